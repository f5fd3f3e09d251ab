"""What some cases run in processes of their own."""
