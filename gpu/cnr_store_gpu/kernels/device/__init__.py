"""The Triton kernels themselves: importing a module of this package imports triton.

Only the launchers beside it import these modules, and only when they launch. Every kernel is built for calls with
``enable_fp_fusion=False``: a fused multiply-add rounds once where the encodings round twice.
"""
