"""Training processes as the command line starts them."""
