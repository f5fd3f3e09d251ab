"""The pipeline example of DeepSpeed's tutorial."""
