"""Draft networks as plain ``nn.Module`` s, without a word about loops or files."""
