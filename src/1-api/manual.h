/* ========================================================================== */
/* >>manual                                                    MARK: - manual */
/* How to use the library.                                                    */
/* Needs: nothing.                                                            */
/* ==========================================================================
 *
 * DOES NOT
 *   - run on GPUs;
 *   - print, exit, abort, or raise signals: errors are kept in the ctx;
 *   - keep global state: two programs' worth of it can live in one process;
 *   - make threads by itself: backends/tshard_threads.h does, one per rank.
 *
 * STEP BY STEP
 *   1. A runner gives your function a ctx, one rank's world:
 *
 *          static const tsh_desc desc = {.logger.log = tsh_log_stderr};          prints errors
 *          int main(void) { return tsh_run(&desc, train, NULL); }               one rank
 *          int main(void) { return tsh_threads_run(2, &desc, train, NULL); }    two, as threads
 *
 *   2. Build a model as a tree of named layers, for one device:
 *
 *          tsh_linear_desc d = {.in = 2, .out = 32};
 *          tsh_module *up = tsh_add_linear(tsh_root(ctx), "up", &d);
 *
 *   3. Shard it by a plan. Without one, every rank computes the same:
 *
 *          static const tsh_plan_rule plan[] = {{.path = "up", .style = TSH_COLWISE},
 *                                               {.path = "down", .style = TSH_ROWWISE}};
 *          tsh_parallelize(tsh_root(ctx), plan, 2);
 *
 *      Blocks named as those of a known family need no plan: tsh_policy_find, and
 *      tsh_parallelize_policy.
 *
 *   4. Train. Ops return NULL after an error and take NULL without harm, so one check per step
 *      suffices:
 *
 *          while (tsh_ok(ctx) && step++ < 500) {
 *              tsh_tensor *y = tsh_forward(down, tsh_gelu(tsh_forward(up, x)));
 *              tsh_tensor *loss = tsh_mean(tsh_pow_scalar(tsh_sub(y, t), 2), TSH_ALL, 0);
 *              tsh_backward(ctx, loss);
 *              tsh_optim_step(adam);
 *              tsh_zero_grads(tsh_root(ctx));
 *              tsh_step_end(ctx);
 *          }
 *
 *   5. return !tsh_ok(ctx); The logger of step 1 has printed the error; tsh_last_error(ctx) has it.
 *
 * SHAPES ARE GLOBAL
 *   Every shape and index is that of the whole tensor: a model reads the same at any degree of
 *   tensor parallelism. tsh_size(t, i) is global, tsh_local_size(t, i) what this rank holds, which
 *   may be nothing: 4 heads on 3 ranks are 2, 2 and 0.
 *
 * ARGUMENTS
 *   A call with a tensor or a module finds the ctx by it; any other call takes the ctx first. Calls
 *   that have a tensor, return none, and must report one that is NULL, take both: tsh_backward,
 *   tsh_data, tsh_item, tsh_read, tsh_write, tsh_hash; and tsh_custom_op. In descriptors 0 is the
 *   default: see tsh_choice. Callbacks get `user` last.
 *
 * LAYOUTS
 *   A tensor is R (replicated), S(d) (sharded along d) or P (a partial sum) over the
 *   tensor-parallel group. Ops derive layouts and refuse what would give wrong numbers, such as a
 *   bias added to a partial sum on every rank; the error names both layouts and the call that mends
 *   it, mostly tsh_redistribute. Layouts are checked at one rank too. Gradients have layouts as
 *   well: that of a P or R value is R, of an S value S alike. A replicated tensor with sharded
 *   consumers collects their contributions as one partial sum and all-reduces it once, as early as
 *   it can.
 *
 * LIFETIMES
 *   Owned tensors (tsh_tensor_new, tsh_tensor_from, tsh_keep, parameters) live until freed or until
 *   the ctx closes. Step tensors, all that ops return, live until tsh_step_end. tsh_backward gives
 *   most of their values back earlier: leaves, the loss, and tensors after tsh_retain_grad keep
 *   them. Reading another is TSH_ERR_STALE. In loops without gradients, tsh_scope_begin and
 *   tsh_scope_end take the place of tsh_step_end. After the first steps a training loop calls the
 *   allocator no more.
 *
 * ERRORS
 *   The first error of a ctx is kept with code, rank and sentence; later ones are ignored. It
 *   reaches the other ranks at this rank's next tsh_ok, tsh_backward, tsh_optim_step, tsh_step_end,
 *   collective or tsh_close: they get the same code with "rank 1: " before the sentence, and leave
 *   the collective they may be in. tsh_clear_error before that recovers from a local error. The
 *   sentence begins with the path of the module, and the function, that fails, in forward and in
 *   backward: "h.3.mlp.c_fc: tsh_linear: input has 5 features, ...".
 *
 *   A call whose arguments are wrong (a required one is NULL, a tensor is stale or belongs to
 *   another ctx, a number is out of range) records an error in the ctx. If no argument leads to
 *   a ctx, it does nothing and returns NULL, 0 or TSH_ERR_ARGUMENT. It never crashes. What a
 *   call cannot see must be right: that arrays and buffers are as long as their counts say,
 *   that what pointers lead to was not freed (a tensor that was freed is noticed until its
 *   handle is used again).
 *
 *   tsh_detect_anomaly(ctx, 1) makes the first NaN or infinity an error; tsh_tape_dump(ctx, stderr)
 *   before tsh_backward shows what was recorded.
 *
 *   The logger of tsh_desc, such as tsh_log_stderr, gets a ctx's error in one sentence, once, when
 *   it reaches the other ranks (with one rank: in the same calls). So an error that is cleared
 *   before is never logged. With several ranks, the sentence begins with the rank that logs it:
 *   "rank 1: ..." is an error of its own, "rank 0 stops: rank 1: ..." one that it learnt from rank
 *   1. Runners (tsh_run, tsh_threads_run, ...) also log why a rank could not start or join. What is
 *   said of a collective names its group: "collective 3 of tp", of dp, pp or world, or of "group 7"
 *   where the program itself split it off.
 *   What begins with "warning: " is no error: on rank 0, once each, what a training loop seems to
 *   forget, with the call that is missing; a step that is skipped; a shard that cannot be kept.
 *   examples/README.md lists mistakes by their sentences.
 *
 * THE SAME NUMBERS EVERYWHERE
 *   Initial weights and dropout masks are keyed by seed, path and global element index: the same
 *   bits at every degree. Sums over ranks have one documented order (see >>comm-api): the same bits
 *   on every rank, run and backend.
 *   Every rank must build the same model, with the same seed. After it is made, or changed, the
 *   next collective of tp, of dp and (pp is 1) of the world compares it first: modules and their
 *   kinds, shapes, layouts and dtypes of parameters, the seed. TSH_ERR_MISMATCH on every rank names
 *   the rank that differs and the first module where it does. With pp, tsh_pipeline_new compares
 *   over the world. The first collective after a change must be a blocking one on all ranks of its
 *   group, or a non-blocking one (tsh_start) on all; the latter compares nothing. What a call is
 *   given (heads, causal) is not compared.
 *
 *   The same bits are promised for FLT_EVAL_METHOD 0 only: where floats are computed in a wider
 *   format (x87, s390x in strict C), results are as accurate, but their last bit may differ.
 *
 * HALF PRECISION
 *   tsh_desc.dtype = TSH_BF16 makes parameters in bf16, and with them all that ops compute from
 *   them; a layer's .dtype overrides it, and tsh_to(module, dtype) converts what is there. Ops
 *   compute in float and round once, when they store; inputs of two dtypes give the wider one (bf16
 *   and f32: f32; bf16 and f16: f32), but norms, products and attention that of their first input
 *   (x, a, q). Losses and gradients are float. An optimiser keeps the exact float weight of a bf16
 *   parameter in the memory that a float would take, so that a bf16 run follows the float run;
 *   .grad_dtype, .moments_dtype and .round_weights trade that for memory. f16 is for inference.
 *
 * MEMORY
 *   Step memory is a pool that grows once. tsh_checkpoint(block, 1) keeps of a block's forward its
 *   inputs only and computes it again in backward, to the same bits.
 *
 * MICRO-BATCHES AND DATA PARALLELISM
 *   Ranks beyond tp times pp form replicas (dp), each with a batch of its own: the same program,
 *   whose parameters' gradients are averaged, in buckets that are sent while backward goes on.
 *   Other leaves, such as inputs, keep the gradient of their own rank's loss; tsh_average_grad
 *   makes one of them be averaged, too. Micro-batches:
 *   tsh_backward_with(ctx, loss, &(tsh_backward_desc){.defer = 1}) for each, then tsh_sync_grads;
 *   nothing is sent in between. Where batches are uneven or targets are ignored, give sums and what
 *   they count: {.summed = 1, .weight = targets}; then the gradient is that of the mean over all.
 *   tsh_optim_desc.zero cuts an optimiser's moments over the replicas: the same bits, less memory.
 *
 * PIPELINES
 *   tsh_desc.pp ranks share a model by layers: every rank makes the whole tree, which costs nothing
 *   yet, and tsh_pipeline_new deals the children of one container to them. Two functions say what
 *   comes before these children and after; tsh_pipeline_train runs them for every micro-batch:
 *
 *          tsh_tensor *first(tsh_ctx *ctx, int k, void *user);    embeds micro-batch k
 *          tsh_tensor *last(tsh_ctx *ctx, tsh_tensor *y, int k, void *user);    its loss
 *          tsh_pipeline_desc d = {.micro_batches = 8, .input = first, .loss = last, .user = me};
 *          tsh_pipeline *pipe = tsh_pipeline_new(tsh_find(root, "h"), &d);
 *          ...
 *              tsh_pipeline_train(pipe, &loss);
 *              tsh_optim_step(adam);
 *              tsh_zero_grads(root);
 *              tsh_step_end(ctx);
 *
 *   Gradients, dropout masks and, where no parameter is tied across stages, every bit are those of
 *   one rank that goes through the same micro-batches; the loss and the norm are known on every
 *   rank. Uneven micro-batches and ignored targets: losses are sums, and .weight what they count.
 *   Of p stages, each is idle for (p - 1) / (micro_batches + p - 1) of the time.
 *
 * SAVING AND LOADING
 *   tsh_save(tsh_root(ctx), "model.safetensors", adam) on every rank writes one file of whole
 *   tensors; tsh_load reads it at any degree and layout, and training goes on with the same bits.
 *   Files of other programs load too, a folder of several with an index among them, if names and
 *   shapes are the model's, or can be made so:
 *
 *          static const tsh_rename names[] = {{"**.gamma", "**.weight"}, {NULL, NULL}};
 *          static const char *const none[] = {"**.inv_freq", NULL};    no parameters
 *          tsh_file_desc d = {.prefix = "model", .rename = names, .ignore = none};
 *          tsh_load_with(tsh_root(ctx), "folder", NULL, &d);
 *
 *   With .broadcast = 1, rank 0 alone has the files, and sends the others their shards, which they
 *   may keep on disk (.cache).
 *
 * WHERE THE TIME GOES
 *   tsh_trace_begin(ctx, &(tsh_trace_desc){.path = "trace.json"}) on every rank, a few steps,
 *   tsh_trace_end(ctx): a file for ui.perfetto.dev with a lane per rank. As text: tsh_profile(ctx,
 *   1), a few steps, tsh_profile(ctx, 0); or TSHARD_PROFILE=1 in the environment.
 *
 * SPEED
 *   Compile with -O3 (and -fno-math-errno where the compiler has it, so that square roots
 *   vectorise), but without -ffast-math, -Ofast and their parts, such as -ffinite-math-only and
 *   -funsafe-math-optimizations: NaN and infinity are values here, and sums have an order. They are
 *   an #error where the compiler defines a macro for them (gcc for each, clang for -ffast-math and
 *   -ffinite-math-only), else an error of tsh_open; -fno-fast-math after them takes them back.
 *   Other files of a program may have them. (Linked with -ffast-math, gcc's programs treat numbers
 *   below 2^-126 in magnitude as 0.)
 *
 *   Kernels for AVX2, AVX-512, AMX and NEON are compiled beside portable ones. tsh_open chooses the
 *   set of instructions that is the fastest on this processor; tsh_cpu_text(ctx) says which, and
 *   why. TSHARD_ISA=avx2 in the environment, for example, forces one of portable, avx2, avx512,
 *   avx512_vnni, avx512_bf16 and amx, or on Arm neon, neon_dotprod, neon_i8mm and neon_bf16;
 *   tsh_open fails if the processor does not have it. Sums may be rounded otherwise by another set,
 *   so let all ranks have the same one.
 *   tsh_desc.gemm takes any other matrix product. With -fopenmp, tsh_desc.threads gives a rank more
 *   cores: the same bits; ranks times threads should not be more than the cores.
 *
 * BUILDING
 *   Give the implementation a source file of its own, such as tshard.c:
 *
 *          #define TSHARD_IMPLEMENTATION
 *          #include "tshard.h"
 *          #include "backends/tshard_threads.h"       and other backends that the program uses
 *
 *   It is then compiled once: in 13 s by gcc 12 at -O3, in 10 s by clang 14. A build compiles again
 *   only files that call the library; compiling and linking the first example takes 0.1 s.
 *
 *   Threads: backends/tshard_threads.h needs -pthread, to compile and to link. The manual on top of
 *   each backend names the macros and libraries that it needs.
 *
 *   Small programs: with the options
 *
 *          -O2 -ffunction-sections -fdata-sections -Wl,--gc-sections -s
 *
 *   the linker leaves out what is not called: a program with one linear layer has 342 KB (gcc 12,
 *   x86-64).
 *
 *   C++: descriptors as {.in = 2, .out = 32}, the form in this manual, are C99 and C++20. With
 *   -pedantic, compilers warn of them before C++20; with -Wextra, g++ warns of the members left
 *   out, in C++20 too. This form has no warnings from C++11 on (= {} sets all members to zero,
 *   their default):
 *
 *          tsh_linear_desc up = {};
 *          up.in = 2;
 *          up.out = 32;
 *          tsh_module *first = tsh_add_linear(net, "up", &up);
 *
 *   CMake: add_subdirectory, FetchContent or find_package(tshard) give the targets tshard::tshard,
 *   ::threads, ::uv, ::mpi and ::blis, and tshard::static, the implementation as a library (with
 *   another backend than threads: tshard::static tshard::uv).
 *   pkg-config: `make install` installs tshard.pc. `make shared` builds libtshard.so. */
