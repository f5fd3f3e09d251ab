"""Models and data that come with the package, to try everything without a download."""
