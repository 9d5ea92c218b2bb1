from .kernels.reference_decode import group_decode as group_decode
from .kernels.reference_decode import sample_tokens as sample_tokens
