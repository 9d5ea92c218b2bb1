"""The group as unit: states, signal, advantages, and the batch that the loss takes."""
