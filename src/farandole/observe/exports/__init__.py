"""What is made of metrics.jsonl for the tools in which people look already: TensorBoard, Weights & Biases. Each is an
`Observer` that is fed from the file, in a process of its own. Nothing here is waited for by a run, or missed by it.
"""
