"""One attention layer, forward and backward: our algorithms beside other engines."""
