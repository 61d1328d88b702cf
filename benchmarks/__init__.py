"""ckptool beside what people use today: the same work, as whole processes, in one run."""
