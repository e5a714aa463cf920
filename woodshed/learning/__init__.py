"""Learning: losses, gradients, optimizer steps and checkpoints."""
