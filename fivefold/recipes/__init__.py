"""Named, typed configurations: `fivefold train NAME`."""
