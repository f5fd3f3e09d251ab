"""The example of DeepSpeed's tutorial on pipelines."""
