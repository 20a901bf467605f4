"""One GPU: what kernels take and allocate, and steps' memory and time beside what is predicted."""
