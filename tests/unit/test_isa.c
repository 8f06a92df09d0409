/* Instruction sets: each one that the processor has, forced by TSHARD_ISA, computes what the
 * portable one does, within the rounding of sums; a name that is none of them is refused;
 * tsh_cpu_text says what was chosen. */
/* build: double nosimd */
#define TSHARD_IMPLEMENTATION
#include "../../tshard.h"
#include "../support/unit.h"

#define COUNT(a) ((int)(sizeof(a) / sizeof((a)[0])))

enum { SET_ROWS = 9, SET_INS = 96, SET_OUTS = 40, SETS = COUNT(tshi_isas) };

/* Opens a ctx with TSHARD_ISA set; the result of tsh_open must be `want`. */
static tsh_ctx *set_open(const char *name, tsh_result want) {
    tsh_ctx *ctx = NULL;
    assert_int_equal(setenv("TSHARD_ISA", name, 1), 0);
    assert_int_equal(tsh_open(NULL, &ctx), want);
    assert_int_equal(unsetenv("TSHARD_ISA"), 0);
    assert_non_null(ctx);
    return ctx;
}

/* Values from -1 to 1, the same in every ctx. */
static tsh_tensor *set_values(tsh_ctx *ctx, int64_t rows, int64_t columns, unsigned seed) {
    static tsh_real at[SET_OUTS * SET_INS];
    for (int64_t i = 0; i < rows * columns; i++) {
        seed = seed * 1664525u + 1013904223u;
        at[i] = (tsh_real)(seed >> 8) / (tsh_real)(1 << 23) - 1;
    }
    return tsh_tensor_from(ctx, TSH_REAL, tsh_shape2(rows, columns), tsh_replicated(), at);
}

static tsh_tensor *set_product_f32(tsh_ctx *ctx) {
    return tsh_linear(set_values(ctx, SET_ROWS, SET_INS, 1), set_values(ctx, SET_OUTS, SET_INS, 2),
                      NULL);
}

static tsh_tensor *set_product_bf16(tsh_ctx *ctx) {
    return tsh_linear(tsh_cast(set_values(ctx, SET_ROWS, SET_INS, 1), TSH_BF16),
                      tsh_cast(set_values(ctx, SET_OUTS, SET_INS, 2), TSH_BF16), NULL);
}

static tsh_tensor *set_product_q8_0(tsh_ctx *ctx) {
    tsh_tensor *w = tsh_tensor_new(ctx, TSH_Q8_0, tsh_shape2(SET_OUTS, SET_INS), tsh_replicated());
    const tsh_real *from = (const tsh_real *)tsh_data(ctx, set_values(ctx, SET_OUTS, SET_INS, 2));
    assert_non_null(from);
    tshi_dtypes[TSH_Q8_0].store(tsh_data(ctx, w), 1, SET_OUTS * SET_INS, from);
    return tsh_linear(set_values(ctx, SET_ROWS, SET_INS, 1), w, NULL);
}

static tsh_tensor *set_elementwise(tsh_ctx *ctx) {
    return tsh_gelu(tsh_add(set_values(ctx, SET_ROWS, SET_INS, 1),
                            tsh_exp(set_values(ctx, SET_ROWS, SET_INS, 3))));
}

static tsh_tensor *set_rows(tsh_ctx *ctx) {
    return tsh_softmax(set_values(ctx, SET_ROWS, SET_INS, 1), 1);
}

static void sets_agree(void **state) {
    /* off: sums of SET_INS products that are at most 1, rounded each time; a bf16 has 8 bits and is
     * below 32 here; functions are accurate to 4 units of a value below 4 */
    static const struct {
        const char *name;
        tsh_tensor *(*compute)(tsh_ctx *ctx);
        double off;
    } what[] = {{"f32", set_product_f32, SET_INS * 1.2e-7 * 16},
                {"bf16", set_product_bf16, 0.125},
                {"q8_0", set_product_q8_0, 0},
                {"elementwise", set_elementwise, 4 * 1.2e-7 * 4},
                {"rows", set_rows, 4 * 1.2e-7}};
    static double want[COUNT(what)][SET_ROWS * SET_INS];
    (void)state;
    for (int s = SETS - 1; s >= 0; s--) {
        if (!tshi_isa_runs(&tshi_isas[s])) continue;
        tsh_ctx *ctx = set_open(tshi_isas[s].name, TSH_OK);
        assert_int_equal(ctx->isa, tshi_isas[s].kernels);
        assert_ptr_equal(ctx->gemm_kernel, tshi_isas[s].gemm);
        assert_ptr_equal(ctx->quant_kernel, tshi_isas[s].quant);
        assert_ptr_equal(strstr(tsh_cpu_text(ctx), tshi_isas[s].name), tsh_cpu_text(ctx));
        assert_non_null(strstr(tsh_cpu_text(ctx), "; forced by TSHARD_ISA"));
        print_message("%s\n", tsh_cpu_text(ctx));
        tsh_no_grad_begin(ctx);
        for (int w = 0; w < COUNT(what); w++) {
            tsh_tensor *y = what[w].compute(ctx);
            const int64_t n = y ? tsh_numel(y) : 0;
            const void *at = tsh_data(ctx, y);
            if (!at) fail_msg("%s: %s", what[w].name, tsh_last_error(ctx)->message);
            for (int64_t i = 0; i < n; i++) {
                const double got = tshi_dtype_get(tsh_dtype_of(y), at, i);
                if (s == SETS - 1) want[w][i] = got;
                if (!(fabs(got - want[w][i]) <= what[w].off))
                    fail_msg("%s by %s: element %d is %.9g, not %.9g", what[w].name,
                             tshi_isas[s].name, (int)i, got, want[w][i]);
            }
        }
        tsh_no_grad_end(ctx);
        unit_close(ctx);
    }
}

/* Without TSHARD_ISA: the best one, and why none before it. An empty value counts as unset. */
static void the_best_is_chosen(void **state) {
    tsh_ctx *ctx = set_open("", TSH_OK);
    (void)state;
    for (int s = 0; s < SETS; s++) {
        const tshi_isa *row = &tshi_isas[s];
        const char *why = tshi_isa_runs(row) && row->slower ? row->slower() : NULL;
        if (!tshi_isa_runs(row)) continue;
        if (why) {
            assert_non_null(strstr(tsh_cpu_text(ctx), why));
            continue;
        }
        assert_ptr_equal(ctx->gemm_kernel, row->gemm);
        assert_ptr_equal(strstr(tsh_cpu_text(ctx), row->name), tsh_cpu_text(ctx));
        break;
    }
    assert_null(strstr(tsh_cpu_text(ctx), "TSHARD_ISA"));
    print_message("%s\n", tsh_cpu_text(ctx));
    unit_close(ctx);
    assert_string_equal(tsh_cpu_text(NULL), "");
}

static void others_are_refused(void **state) {
    const char *missing = "avx512_vpu";
    (void)state;
    for (int s = 0; s < SETS; s++)
        if (!tshi_isa_runs(&tshi_isas[s])) missing = tshi_isas[s].name;
    for (int turn = 0; turn < 3; turn++) {
        const char *name = turn == 0 ? missing : turn == 1 ? "AVX2" : "avx";
        tsh_ctx *ctx = set_open(name, TSH_ERR_ARGUMENT);
        char want[128];
        (void)snprintf(want, sizeof want, "tsh_open: TSHARD_ISA is \"%s\"; it takes ", name);
        assert_non_null(strstr(tsh_last_error(ctx)->message, want));
        for (int s = 0; s < SETS; s++)
            if (tshi_isa_runs(&tshi_isas[s]))
                assert_non_null(strstr(tsh_last_error(ctx)->message, tshi_isas[s].name));
        assert_true(strlen(tsh_cpu_text(ctx)) > 0);
        tsh_close(ctx);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sets_agree),
        cmocka_unit_test(the_best_is_chosen),
        cmocka_unit_test(others_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
