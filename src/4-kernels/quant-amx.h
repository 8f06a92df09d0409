/* ========================================================================== */
/* >>quant-amx                                    MARK: - quant-amx (private) */
/* Kernels of quantised weights with AMX.                                     */
/* Needs: >>gemm-amx >>quant-vnni.                                            */
/* ========================================================================== */

#if TSHI_GEMM_AMX
/* Implements tshi_quant_kernel.tiles: configures AMX's tile registers for products of 8 rows of X
 * and 16 rows of W, 32 elements of each, or releases the registers. */
TSHI_AMX static void tshi_quant_tiles_amx(int begin) {
    if (begin)
        tshi_gemm_amx_configure(TSHI_QUANT_FEW, 8, 64);
    else
        TSHI_AMX_RELEASE();
}

/* Implements tshi_quant_kernel.move. AMX multiplies signed bytes: its tiles hold weights as they
 * are, without what other kernels' tiles add to them. */
TSHI_AMX static void tshi_quant_move_amx(tshi_quant_tile *to, const tshi_quant_source *from) {
    const int added = from->size == TSHI_QUANT_Q8 ? -128 : from->size == TSHI_QUANT_Q4 ? 8 : 0;
    const __m512i offset = _mm512_set1_epi8((char)added); /* as a signed byte, 128 is -128 */
    tshi_quant_move_vnni(to, from);
    for (int b = 0; b < from->count; b++)
        for (int i = 0; i < 8; i++)
            _mm512_store_si512(to[b].w[i], _mm512_sub_epi8(_mm512_load_si512(to[b].w[i]), offset));
}

/* Multiplies block b of 8 rows of X with tile[b], if there is such a block, and stores the sums in
 * n[b], of shape (8, 16). sum, left, right: numbers of the tile registers to use. */
#define TSHI_QUANT_BLOCK(b, sum, left, right)                                                      \
    if ((b) < count) {                                                                             \
        TSHI_AMX_ZERO(sum);                                                                        \
        TSHI_AMX_LOAD(left, x[TSHI_QUANT_FEW * (b)].q, sizeof *x);                                 \
        TSHI_AMX_LOAD(right, tile[b].w, 64);                                                       \
        TSHI_AMX_INT8(sum, left, right);                                                           \
        TSHI_AMX_STORE(sum, n[b], 64);                                                             \
    }

/* Implements tshi_quant_kernel.dot. If X has few rows and there are no tiles (tile is NULL), VNNI
 * computes the products from W itself, to the same bits, since sums of integers are exact. */
TSHI_AMX static void tshi_quant_dot_amx(const tshi_quant_tile *tile, const tshi_quant_source *from,
                                        const tshi_quant_input *x, float *sums, int64_t stride,
                                        int rows) {
    const int has_min = from->size == TSHI_QUANT_Q4_1, count = from->count;
    __attribute__((aligned(64))) int32_t n[TSHI_QUANT_STRIP][8 * 16]; /* integer sums per block */
    if (!tile) {
        tshi_quant_dot_vnni(tile, from, x, sums, stride, rows);
        return;
    }
    TSHI_AMX_STORED();
    TSHI_QUANT_BLOCK(0, 0, 4, 6)
    TSHI_QUANT_BLOCK(1, 1, 5, 7)
    TSHI_QUANT_BLOCK(2, 2, 4, 6)
    TSHI_QUANT_BLOCK(3, 3, 5, 7)
    TSHI_QUANT_BLOCK(4, 0, 4, 6)
    TSHI_QUANT_BLOCK(5, 1, 5, 7)
    TSHI_QUANT_BLOCK(6, 2, 4, 6)
    TSHI_QUANT_BLOCK(7, 3, 5, 7)
    for (int r = 0; r < rows; r++) {
        __m512 sum = _mm512_loadu_ps(sums + r * stride);
        for (int b = 0; b < count; b++) {
            const tshi_quant_input *y = &x[TSHI_QUANT_FEW * b + r];
            const __m512 scale = _mm512_mul_ps(_mm512_load_ps(tile[b].scale),
                                               _mm512_set1_ps(y->scale));
            const __m512 of = _mm512_cvtepi32_ps(_mm512_load_si512(&n[b][16 * r]));
            sum = _mm512_add_ps(sum, _mm512_mul_ps(scale, of));
            if (has_min)
                sum = _mm512_add_ps(sum, _mm512_mul_ps(_mm512_load_ps(tile[b].min),
                                                       _mm512_set1_ps(y->sum)));
        }
        _mm512_storeu_ps(sums + r * stride, sum);
    }
}
#undef TSHI_QUANT_BLOCK
#endif /* TSHI_GEMM_AMX */
