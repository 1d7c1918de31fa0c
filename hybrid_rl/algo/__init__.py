"""Advantages, losses and corrections: pure functions of tensors, one small file each, chosen by `_target_` in
conf/algo."""
