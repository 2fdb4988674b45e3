"""Plain data and errors that everything else stands on. No torch.distributed in here."""
