"""Python source: decoding, syntax trees, scans for names, and exact edits."""
