"""lisa-tiny: the language it is trained on, its training and its evaluation."""
