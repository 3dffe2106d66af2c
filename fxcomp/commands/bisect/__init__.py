"""Find the tensors whose compression costs the loss, by short trainings on ranks of this machine."""
