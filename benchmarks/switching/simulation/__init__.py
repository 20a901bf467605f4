"""Hot switching on 32 GPUs, modelled."""
