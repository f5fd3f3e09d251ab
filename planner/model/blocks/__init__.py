"""TrainingSpec with blocks(model) -> LayerGraph: run the blocks that the user names instead of tracing the model."""
