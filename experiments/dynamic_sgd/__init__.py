"""What becomes of training when the batch follows the workers: the study's page is README.md."""
