"""Small models for the self-test, each in a file like a user's."""
