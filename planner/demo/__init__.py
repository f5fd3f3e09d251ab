"""Models and data that come with the package, so that everything can be tried without a download."""
