"""The data axis: DDP, ZeRO-1, ZeRO-2, ZeRO-3 (FSDP2), HSDP, offload."""
