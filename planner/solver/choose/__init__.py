"""Plans that people cut by hand, and the choice of the plan whose gradients are least stale."""
