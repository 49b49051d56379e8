"""What several tests share: waiting on conditions, and whole pipelines."""
