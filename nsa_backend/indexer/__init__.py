"""The indexer's side: its metadata, a top-k over its logits, and a schedule that DeepGEMM agrees with."""
