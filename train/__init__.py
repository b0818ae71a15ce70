"""Training: what is learned for kvjax, one file each."""
