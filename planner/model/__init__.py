"""The user's model file -> nn.Module -> LayerGraph; LayerGraph + cut -> stage modules."""
