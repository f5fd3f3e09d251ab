"""The training loop of one worker: executes its instruction stream on its stages."""
