"""Communication of FSDP2 and DDP, and the parts that adapters of other engines share."""
