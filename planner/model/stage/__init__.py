"""LayerGraph + cut -> the nn.Module of a stage."""
