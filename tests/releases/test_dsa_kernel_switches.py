"""SGLang's switches for its kernels decide which of them are handed out."""

from sglang.srt.environ import envs

from nsa_backend.adapters.installed import adapter


def test_the_topk_of_pages_is_offered_unless_it_is_switched_off():
    with envs.SGLANG_OPT_USE_TOPK_V2.override(True):
        paged, windowed = adapter.topk_v2()
        assert callable(paged)
        assert windowed is None or callable(windowed)
    with envs.SGLANG_OPT_USE_TOPK_V2.override(False):
        assert adapter.topk_v2() is None


def test_tiles_are_not_scheduled_ahead_where_fa3_is_not_sgl_kernels():
    with envs.SGLANG_USE_SGL_FA3_KERNEL.override(False):
        assert adapter.fa3_scheduler() is None
