/* The library and all tests that look inside it, so that it is compiled once for these and for the
 * tests that are linked with it. With private_main.c this is one program. The name by which it is
 * called picks the test: build/tests/unit/test_gemm is a link to build/tests/private. Each of these
 * files is a program of its own, too; names that two of them use are renamed here. */
#include "bfloat.h"
#include "library.c"

#include <stdio.h>
#include <string.h>

int main_of_test_gemm(void);
#define main main_of_test_gemm
#define check gemm_check
#define ROWS GEMM_ROWS
#define SPREAD GEMM_SPREAD
#include "../unit/test_gemm.c"
#undef main
#undef check
#undef ROWS
#undef SPREAD

int main_of_test_init(void);
#define main main_of_test_init
#define at init_at
#define same init_same
#include "../unit/test_init.c"
#undef main
#undef at
#undef same

int main_of_test_optim(void);
#define main main_of_test_optim
#define expect_values optim_expect_values
#include "../unit/test_optim.c"
#undef main
#undef expect_values

int main_of_test_rng(void);
#define main main_of_test_rng
#include "../unit/test_rng.c"
#undef main

int main_of_test_tensor(void);
#define main main_of_test_tensor
#include "../unit/test_tensor.c"
#undef main

int main_of_test_dtype(void);
#define main main_of_test_dtype
#include "../unit/test_dtype.c"
#undef main

int main_of_test_isa(void);
#define main main_of_test_isa
#include "../unit/test_isa.c"
#undef main

int main_of_test_quant(void);
#define main main_of_test_quant
#define kinds quant_kinds
#include "../unit/test_quant.c"
#undef main
#undef kinds

int main_of_test_gradcheck(void);
#define main main_of_test_gradcheck
#define leaf gradcheck_leaf
#define INPUTS GRADCHECK_INPUTS
#include "../op/test_gradcheck.c"
#undef main
#undef leaf
#undef INPUTS

int main_of_test_io_dtype(void);
#define main main_of_test_io_dtype
#define add io_dtype_add
#define begin io_dtype_begin
#define end io_dtype_end
#define golden io_dtype_golden
#define numbers io_dtype_numbers
#define VALUES IO_DTYPE_VALUES
#include "../unit/test_io_dtype.c"
#undef main
#undef add
#undef begin
#undef end
#undef golden
#undef numbers
#undef VALUES

int main_of_test_lookup(void);
#define main main_of_test_lookup
#include "../layer/test_lookup.c"
#undef main

#ifndef TESTS_DOUBLE /* these are of float alone */
int main_of_test_kernel(void);
#define main main_of_test_kernel
#define same kernel_same
#define ulp kernel_ulp
#define CHUNK KERNEL_CHUNK
#define SPREAD KERNEL_SPREAD
#include "../unit/test_kernel.c"
#undef main
#undef same
#undef ulp
#undef CHUNK
#undef SPREAD

int main_of_test_module(void);
#define main main_of_test_module
#include "../unit/test_module.c"
#undef main

int main_of_test_team(void);
#define main main_of_test_team
#define INPUTS TEAM_INPUTS
#define op_case team_op_case
#include "../op/test_team.c"
#undef main
#undef INPUTS
#undef op_case

int main_of_test_safetensors(void);
#define main main_of_test_safetensors
#define LLVMFuzzerTestOneInput safetensors_LLVMFuzzerTestOneInput
#include "../fuzz/test_safetensors.c"
#undef main
#undef LLVMFuzzerTestOneInput

int main_of_test_index(void);
#define main main_of_test_index
#define LLVMFuzzerTestOneInput index_LLVMFuzzerTestOneInput
#include "../fuzz/test_index.c"
#undef main
#undef LLVMFuzzerTestOneInput

int main_of_test_messages(void);
#define main main_of_test_messages
#define run messages_run
#define leaf messages_leaf
#define compare messages_compare
#include "../unit/test_messages.c"
#undef main
#undef run
#undef leaf
#undef compare

int main_of_test_values(void);
#define main main_of_test_values
#undef EXPECT /* of unit.h: it has its own */
#include "../op/test_values.c"
#undef main
#endif

static const struct {
    const char *name;
    int (*run)(void);
} private_tests[] = {
    {"test_gemm", main_of_test_gemm},
    {"test_init", main_of_test_init},
    {"test_optim", main_of_test_optim},
    {"test_rng", main_of_test_rng},
    {"test_tensor", main_of_test_tensor},
    {"test_dtype", main_of_test_dtype},
    {"test_isa", main_of_test_isa},
    {"test_io_dtype", main_of_test_io_dtype},
    {"test_quant", main_of_test_quant},
    {"test_gradcheck", main_of_test_gradcheck},
    {"test_lookup", main_of_test_lookup},
#ifndef TESTS_DOUBLE
    {"test_kernel", main_of_test_kernel},
    {"test_module", main_of_test_module},
    {"test_team", main_of_test_team},
    {"test_safetensors", main_of_test_safetensors},
    {"test_index", main_of_test_index},
    {"test_messages", main_of_test_messages},
    {"test_values", main_of_test_values},
#endif
};

int private_main(int argc, char **argv);

/* Runs the test that argv[0] names, which may have a suffix for its configuration ("_double"). */
int private_main(int argc, char **argv) {
    const char *slash = argc > 0 ? strrchr(argv[0], '/') : NULL;
    const char *name = slash ? slash + 1 : argc > 0 ? argv[0] : "";
    size_t i;
    for (i = 0; i < sizeof private_tests / sizeof private_tests[0]; i++) {
        const size_t length = strlen(private_tests[i].name);
        if (strncmp(name, private_tests[i].name, length) == 0 && strchr("_", name[length]))
            return private_tests[i].run();
    }
    fprintf(stderr, "%s is none of the tests in tests/support/private.c\n", name);
    return 1;
}
