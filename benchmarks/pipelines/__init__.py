"""Pipelines on hosts behind slow links: steps beside the simulator, bytes, and other ways."""
