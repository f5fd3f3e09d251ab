"""nn.Module + example batch -> LayerGraph, through torch.export."""
