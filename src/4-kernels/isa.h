/* ========================================================================== */
/* >>isa                                                MARK: - isa (private) */
/* The table of instruction sets; which one a ctx uses, chosen by tsh_open.   */
/* Needs: >>env >>gemm-api >>quant-product.                                   */
/* ========================================================================== */

/* An instruction set: one row of the table tshi_isas. */
typedef struct tshi_isa {
    const char *name; /* value of TSHARD_ISA that selects it: Linux's name for the set, if any */
    /* Returns 1 if the processor has the instructions and the system lets programs use them; NULL:
     * every processor has them. */
    int (*runs)(void);
    /* (optional) Returns why this row is slower than the next one on this processor, as text for
     * tsh_cpu_text, or NULL if it is not slower. A slower row is used only if TSHARD_ISA names
     * it. */
    const char *(*slower)(void);
    int kernels;                    /* index of its elementwise kernels: TSHI_ISA_... */
    const tshi_gemm_kernel *gemm;   /* products of floats, bf16 and f16 */
    const tshi_quant_kernel *quant; /* products with quantised weights */
} tshi_isa;

/* -- what processors have ---------------------------------------------------- */

#if TSHI_X86
/* Calls CPUID, subleaf 0: r becomes EAX, EBX, ECX, EDX. (<cpuid.h> is not included, since its
 * macro __cpuid changes a function that <windows.h> declares.) */
static TSHI_COLD void tshi_isa_cpuid(uint32_t leaf, uint32_t r[4]) {
    __asm__("cpuid" : "=a"(r[0]), "=b"(r[1]), "=c"(r[2]), "=d"(r[3]) : "0"(leaf), "2"(0));
}

/* Appends the processor's vendor, family and model to text. */
static TSHI_COLD void tshi_isa_add_processor(char *text, size_t capacity) {
    char vendor[13] = "";
    uint32_t r[4], family, model;
    tshi_isa_cpuid(0, r); /* 12 bytes of the vendor's name are in EBX, EDX, ECX */
    memcpy(vendor, &r[1], 4);
    memcpy(vendor + 4, &r[3], 4);
    memcpy(vendor + 8, &r[2], 4);
    tshi_isa_cpuid(1, r); /* EAX: family in bits 8 to 11 and 20 to 27, model in 4 to 7, 16 to 19 */
    family = (r[0] >> 8 & 15) + ((r[0] >> 8 & 15) == 15 ? r[0] >> 20 & 255 : 0);
    model = (r[0] >> 4 & 15) | (r[0] >> 12 & 0xF0);
    tsh_text_add(text, capacity, "%s family %u model %u", vendor, (unsigned)family,
                 (unsigned)model);
}

static TSHI_COLD int tshi_isa_runs_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static TSHI_COLD int tshi_isa_runs_avx512(void) {
    return tshi_isa_runs_avx2() && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}

static TSHI_COLD int tshi_isa_runs_vnni(void) {
    return tshi_isa_runs_avx512() && __builtin_cpu_supports("avx512vnni");
}
#elif TSHI_NEON
static TSHI_COLD void tshi_isa_add_processor(char *text, size_t capacity) {
    const unsigned id = tshi_arm_id();
    if (id)
        tsh_text_add(text, capacity, "Arm processor, implementer 0x%02x part 0x%03x", id >> 24,
                     id >> 4 & 0xFFF);
    else
        tsh_text_add(text, capacity, "%s", "Arm processor");
}

#if TSHI_NEON_DOT
static TSHI_COLD int tshi_isa_runs_dotprod(void) {
    return (tshi_arm_extensions() & TSHI_ARM_DOT) != 0;
}
#endif

#if TSHI_NEON_MM
static TSHI_COLD int tshi_isa_runs_i8mm(void) {
    return tshi_isa_runs_dotprod() && (tshi_arm_extensions() & TSHI_ARM_MM);
}
#endif

#if TSHI_NEON_PAIRS
static TSHI_COLD int tshi_isa_runs_bf16(void) {
    return tshi_isa_runs_i8mm() && (tshi_arm_extensions() & TSHI_ARM_BF16);
}
#endif
#else
static TSHI_COLD void tshi_isa_add_processor(char *text, size_t capacity) {
    tsh_text_add(text, capacity, "%s", "a processor for which only these kernels are compiled");
}
#endif

#if TSHI_GEMM_BF16S
static TSHI_COLD int tshi_isa_runs_bf16(void) {
    return tshi_isa_runs_vnni() && __builtin_cpu_supports("avx512bf16");
}

/* VDPBF16PS adds two products to each of 16 floats; FMA (VFMADD231PS) adds one.
 *
 * Intel's processors with AMX or AVX512_FP16 (Sapphire, Emerald and Granite Rapids) start a
 * VDPBF16PS every 2 cycles, as it is 4 micro-ops (LLVM, X86SchedSapphireRapids.td: VDPBF16PSZ), and
 * 2 FMA per cycle: that is half as many products per cycle. A loop of 12 independent ones on
 * Sapphire Rapids measures the same: 3.8 times as long as FMA. With FMA, products of 64 rows or
 * more are 1.5 times as fast, of 2 to 8 rows 1.3 to 1.6 times, and of one row as fast. These
 * processors are recognised by AVX512_FP16, since virtual machines change the model number. Cooper
 * Lake, which has AVX512_BF16 too, does not have AVX512_FP16.
 *
 * AMD's processors (Zen 4 and 5) start as many VDPBF16PS per cycle as FMA (uops.info). */
static TSHI_COLD const char *tshi_isa_slower_bf16(void) {
    uint32_t r[4];
    tshi_isa_cpuid(7, r);
    return __builtin_cpu_is("intel") && (r[3] >> 23 & 1) /* EDX bit 23: AVX512_FP16 */
               ? "bf16 is multiplied by FMA, since VDPBF16PS has half its rate here"
               : NULL;
}
#endif

#if TSHI_GEMM_AMX
/* Returns 1 if the processor has AMX and Linux, asked by arch_prctl(ARCH_REQ_XCOMP_PERM,
 * XFEATURE_XTILEDATA), permits this process to use it. */
static TSHI_COLD int tshi_isa_runs_amx(void) {
#if defined(TSHI_AMX_MODEL)
    return tshi_isa_runs_bf16();
#else
    const uint32_t bits = 1u << 22 | 1u << 24 | 1u << 25; /* AMX-BF16, AMX-TILE, AMX-INT8 */
    uint32_t r[4];
    long refused = 158; /* the number of the system call, then its result */
    tshi_isa_cpuid(7, r);
    if (!tshi_isa_runs_bf16() || (r[3] & bits) != bits) return 0;
    __asm__ volatile("syscall" /* strict C99 does not declare syscall() */
                     : "+a"(refused)
                     : "D"(0x1023L), "S"(18L)
                     : "rcx", "r11", "memory");
    return refused == 0;
#endif
}
#endif

/* -- the table ------------------------------------------------------------- */

/* One row per instruction set, the best one first. The last one runs on every processor. */
static const tshi_isa tshi_isas[] = {
#if TSHI_GEMM_AMX
    {"amx", tshi_isa_runs_amx, NULL, TSHI_ISA_AVX512, &tshi_gemm_kernel_amx,
     &tshi_quant_kernel_amx},
#endif
#if TSHI_GEMM_BF16S
    {"avx512_bf16", tshi_isa_runs_bf16, tshi_isa_slower_bf16, TSHI_ISA_AVX512,
     &tshi_gemm_kernel_bf16, &tshi_quant_kernel_vnni},
#endif
#if TSHI_X86
    {"avx512_vnni", tshi_isa_runs_vnni, NULL, TSHI_ISA_AVX512, &tshi_gemm_kernel_avx512,
     &tshi_quant_kernel_vnni},
    {"avx512", tshi_isa_runs_avx512, NULL, TSHI_ISA_AVX512, &tshi_gemm_kernel_avx512,
     &tshi_quant_kernel_avx2},
    {"avx2", tshi_isa_runs_avx2, NULL, TSHI_ISA_AVX2, &tshi_gemm_kernel_avx2,
     &tshi_quant_kernel_avx2},
#endif
#if TSHI_NEON_PAIRS
    {"neon_bf16", tshi_isa_runs_bf16, NULL, TSHI_ISA_PORTABLE, &tshi_gemm_kernel_bfmmla,
     &tshi_quant_kernel_mm},
#endif
#if TSHI_NEON_MM
    {"neon_i8mm", tshi_isa_runs_i8mm, NULL, TSHI_ISA_PORTABLE, &tshi_gemm_kernel_neon,
     &tshi_quant_kernel_mm},
#endif
#if TSHI_NEON_DOT
    {"neon_dotprod", tshi_isa_runs_dotprod, NULL, TSHI_ISA_PORTABLE, &tshi_gemm_kernel_neon,
     &tshi_quant_kernel_dot},
#endif
#if TSHI_NEON
    {"neon", NULL, NULL, TSHI_ISA_PORTABLE, &tshi_gemm_kernel_neon, &tshi_quant_kernel_c},
#endif
#if TSHI_VECTORS /* "portable" has GNU C's 16-byte vectors; "c", the reference, has plain loops */
    {"portable", NULL, NULL, TSHI_ISA_PORTABLE, &tshi_gemm_kernel_v128, &tshi_quant_kernel_c},
    {"c", NULL, NULL, TSHI_ISA_PORTABLE, &tshi_gemm_kernel_c, &tshi_quant_kernel_c},
#else
    {"portable", NULL, NULL, TSHI_ISA_PORTABLE, &tshi_gemm_kernel_c, &tshi_quant_kernel_c},
#endif
};
enum { TSHI_ISA_ROWS = (int)(sizeof tshi_isas / sizeof tshi_isas[0]) };

/* Returns 1 if this processor has the instruction set of a row of tshi_isas. */
static TSHI_COLD int tshi_isa_runs(const tshi_isa *row) {
    return !row->runs || row->runs();
}

/* Returns the instruction set that is the fastest on this processor, as a row of tshi_isas. */
static TSHI_COLD const tshi_isa *tshi_isa_pick(void) {
    const tshi_isa *row = tshi_isas;
    while (!tshi_isa_runs(row) || (row->slower && row->slower())) row++;
    return row;
}

/* -- the choice for a ctx ------------------------------------------------------ */

/* Makes ctx compute with the instruction set of a row of tshi_isas. */
static TSHI_COLD void tshi_isa_use(tsh_ctx *ctx, const tshi_isa *row) {
    ctx->isa = row->kernels;
    ctx->gemm_kernel = row->gemm;
    ctx->quant_kernel = row->quant;
}

/* Writes what tsh_cpu_text returns; forced: 1 if TSHARD_ISA named the row. */
static TSHI_COLD void tshi_isa_describe(tsh_ctx *ctx, const tshi_isa *row, int forced) {
    tsh_text_add(ctx->cpu, sizeof ctx->cpu, "%s: ", row->name);
    tshi_isa_add_processor(ctx->cpu, sizeof ctx->cpu);
    if (forced) tsh_text_add(ctx->cpu, sizeof ctx->cpu, "; forced by TSHARD_ISA");
    for (const tshi_isa *other = tshi_isas; other < row && !forced; other++)
        if (tshi_isa_runs(other)) tsh_text_add(ctx->cpu, sizeof ctx->cpu, "; %s", other->slower());
}

/* Returns the row of tshi_isas that has this name, the value of TSHARD_ISA. If there is none, or
 * this processor does not have it, records an error and returns NULL. */
static TSHI_COLD const tshi_isa *tshi_isa_named(tsh_ctx *ctx, const char *name) {
    char list[TSH_MESSAGE_SIZE / 4] = "";
    tsh_error error;
    for (int i = 0; i < TSHI_ISA_ROWS; i++) {
        if (!tshi_isa_runs(&tshi_isas[i])) continue;
        if (strcmp(tshi_isas[i].name, name) == 0) return &tshi_isas[i];
        tsh_text_add(list, sizeof list, "%s%s",
                     !list[0]                ? ""
                     : i < TSHI_ISA_ROWS - 1 ? ", "
                                             : " or ",
                     tshi_isas[i].name);
    }
    (void)tshi_env_refuse("TSHARD_ISA", name, &error, "what this processor has: %s", list);
    (void)tsh_fail(ctx, error.code, "tsh_open: %s", error.message);
    return NULL;
}

/* Chooses the instruction set of a new ctx: the best one, or the one that TSHARD_ISA names. */
static TSHI_COLD void tshi_isa_open(tsh_ctx *ctx) {
    const char *name = tshi_env_text("TSHARD_ISA");
    const tshi_isa *row = name ? tshi_isa_named(ctx, name) : NULL;
    const int forced = row != NULL;
    if (!row) row = tshi_isa_pick();
    tshi_isa_use(ctx, row);
    tshi_isa_describe(ctx, row, forced);
}

TSH_API TSHI_COLD const char *tsh_cpu_text(const tsh_ctx *ctx) {
    return ctx ? ctx->cpu : "";
}
