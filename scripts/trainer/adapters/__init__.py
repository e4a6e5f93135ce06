"""The networks that are trained, with the tensor names and shapes of the engine."""
