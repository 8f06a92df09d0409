# tshard: `make help` lists the targets; everything that is built goes under build/.
#
#   config=debug|release   how programs and tests are compiled          (release)
#   werror=1               warnings are errors
#   CC=gcc|clang           the compiler; `make check` runs both         (cc)
#   MPICC=mpicc.mpich      the one of build/gpt-mpi, which has --backend mpi (mpicc)
#   ARGS="..."             flags for examples/gpt.c (make run) or tests/bench/run.py (make bench)
#   only=unit/test_base    the tests whose name holds this string       (all)
#   seconds=60             how long make fuzz feeds each target         (60)
#   FULL=1                 make faults with the full counts, make bench with three times the rounds

config ?= release
MPICC  ?= mpicc
jobs   ?= $(shell nproc 2>/dev/null || echo 1)
PYTHON ?= python3

# san is set by the sanitizer targets below, which call make again.
OUT := build$(if $(san),/$(san),$(if $(filter debug,$(config)),/debug))

# ---- flags -------------------------------------------------------------------
# The strict set. WARN is for C and C++, WARN_C for C alone; tests/compile/check.py
# adds what only clang knows.

WARN   := -Wall -Wextra -pedantic -Wconversion -Wsign-conversion -Wshadow -Wundef -Wcast-qual \
          -Wcast-align -Wdouble-promotion -Wformat=2 -Wvla -Wwrite-strings
WARN_C := -Wstrict-prototypes -Wmissing-prototypes -Wc++-compat

OPT_release := -O2 -g -fno-math-errno
OPT_debug   := -O0 -g
OPT_asan    := -O1 -g -fsanitize=address -fno-omit-frame-pointer
OPT_ubsan   := -O1 -g -fsanitize=undefined -fno-sanitize-recover=all
OPT_tsan    := -O1 -g -fsanitize=thread

OPT   = $(OPT_$(or $(san),$(config)))
WALL := $(WARN) $(WARN_C) $(if $(filter 1,$(werror)),-Werror)
# Backends need POSIX beside strict C99; OpenMP gives a rank more threads, where the compiler has it
# (the thread sanitizer does not know its barriers).
OPENMP := $(if $(filter tsan,$(san)),,$(shell echo 'int main(void) { return 0; }' | \
	$(CC) -fopenmp -x c -o /dev/null - 2>/dev/null && echo -fopenmp))
STD  := -std=c99 -D_POSIX_C_SOURCE=200809L $(OPENMP)
LIBS := -lm -pthread

# ---- what there is -----------------------------------------------------------
# Every tests/<kind>/test_*.c is one cmocka program. One that looks inside defines
# TSHARD_IMPLEMENTATION; the others are linked with tests/support/library.c. One with the line
# "/* build: double */" is also built with TSHARD_REAL=double. Every examples/0*.c is a test too: it
# runs and prints something. Every tests/<kind>/test_*.py is one that tells what it did in cmocka's
# words.

HEADERS  := $(wildcard tshard.h backends/*.h examples/*.h tests/*.h tests/*/*.h)
SOURCES  := $(wildcard $(patsubst %,tests/%/test_*.c,unit op layer comm fault oom fuzz))
DOUBLES  := $(if $(SOURCES),$(shell grep -lx '/\* build: double \*/' $(SOURCES)))
LINKED   := $(if $(SOURCES),$(filter-out tests/fuzz/%,$(shell grep -L TSHARD_IMPLEMENTATION \
              $(SOURCES))))
TESTS    := $(sort $(SOURCES:%.c=$(OUT)/%) $(DOUBLES:%.c=$(OUT)/%_double))
EXAMPLES := $(patsubst %.c,$(OUT)/%,$(sort $(wildcard examples/0*.c)))
SCRIPTS  := $(if $(san),tests/fault/test_run.py,$(wildcard tests/*/test_*.py))
LAUNCHER := $(OUT)/tshard-run
UV_USERS := $(patsubst %.c,$(OUT)/%,$(shell grep -ls tshard_uv.h tests/*/*.c))
chosen    = $(if $(only),$(foreach t,$(1),$(if $(findstring $(only),$(t)),$(t))),$(1))
PROGRAMS := $(call chosen,$(TESTS) $(EXAMPLES))

.PHONY: help run tshard-run test test-run test-mpi test-arm build-tests faults check lint seeds \
	asan ubsan tsan fuzz bench bench-comm overhead deps deps-fuzz deps-bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^#   //p' Makefile
	@sed -n 's/^\([a-z][a-z -]*\):.*## /make \1\n/p' Makefile | paste - - | expand -t 24

# ---- run ---------------------------------------------------------------------

run: $(OUT)/gpt ## train a GPT on two ranks; ARGS="--text FILE ..." for your own text
	@$(OUT)/gpt --out build/run $(ARGS)

# With libuv and libsodium at hand, gpt has --backend tcp too; with BLIS, --gemm blis.
UV := $(shell printf '\043include <uv.h>\n\043include <sodium.h>\n' \
	| $(CC) -E - >/dev/null 2>&1 && echo yes)
BLIS := $(patsubst %/libblis.so,%,$(firstword $(wildcard /usr/lib/*/blis-pthread/libblis.so)))
LINK_BLIS := $(if $(BLIS),-L$(BLIS) -Xlinker -rpath -Xlinker $(BLIS) -lblis)

$(OUT)/gpt build/gpt-mpi: OPT_release := -O3 -fno-math-errno
build/gpt-mpi: CC := $(MPICC)
build/gpt-mpi: LIBS += -DGPT_MPI
$(OUT)/gpt build/gpt-mpi: examples/gpt.c $(HEADERS)
	@mkdir -p $(@D)
	$(CC) $(STD) $(OPT) -o $@ $< $(LIBS) $(if $(UV),-DGPT_TCP -luv -lsodium) \
		$(if $(BLIS),-DGPT_BLIS) $(LINK_BLIS)

tshard-run: $(LAUNCHER) ## the launcher of runs on one host or several
$(LAUNCHER): backends/tshard-run.c
	@mkdir -p $(@D)
	$(CC) $(STD) $(OPT) $(WALL) -o $@ $< -luv -lsodium

# ---- tests -------------------------------------------------------------------

test: deps ## build and run all tests
	@$(MAKE) --no-print-directory test-run

asan ubsan tsan: deps ## the tests under a sanitizer
	@$(MAKE) --no-print-directory san=$@ test-run

# A program that does not build is a failed test, not the end of the run.
test-run:
	@$(MAKE) --no-print-directory --keep-going -j$(jobs) build-tests; \
	TSHARD_RUN=$(abspath $(LAUNCHER)) $(PYTHON) tests/run.py $(if $(filter tsan,$(san)),--slow 5) \
		$(PROGRAMS) $(call chosen,$(SCRIPTS))

build-tests: $(PROGRAMS) $(LAUNCHER) \
	$(if $(filter %/test_hosts.py %/test_gpt.py,$(call chosen,$(SCRIPTS))),$(OUT)/gpt)

$(UV_USERS): LIBS += -luv -lsodium
$(OUT)/tests/op/test_gemm_%: LIBS += $(if $(BLIS),-DTESTS_BLIS) $(LINK_BLIS)

COMPILE_TEST = @mkdir -p $(@D); echo "  CC $@"; $(CC) $(STD) $(OPT) $(WALL)

$(LINKED:%.c=$(OUT)/%): $(OUT)/tests/library.o
$(LINKED:%.c=$(OUT)/%_double): $(OUT)/tests/library_double.o

$(OUT)/tests/library.o: tests/support/library.c $(HEADERS)
	$(COMPILE_TEST) -c -o $@ $<

$(OUT)/tests/library_double.o: tests/support/library.c $(HEADERS)
	$(COMPILE_TEST) -DTSHARD_REAL=double -c -o $@ $<

$(OUT)/tests/%: tests/%.c $(HEADERS)
	$(COMPILE_TEST) -o $@ $< $(filter %.o,$^) -lcmocka $(LIBS)

$(OUT)/tests/%_double: tests/%.c $(HEADERS)
	$(COMPILE_TEST) -DTSHARD_REAL=double -o $@ $< $(filter %.o,$^) -lcmocka $(LIBS)

$(OUT)/examples/%: examples/%.c $(HEADERS)
	$(COMPILE_TEST) -o $@ $< $(LIBS)

# The tests of layers and collectives on the processes of an mpirun, with each MPI that is here.
# Files that look into private structures bring a library of their own. Left out: what is over TCP.
MPIS      := $(or $(foreach m,openmpi mpich,$(if $(shell command -v mpicc.$m),$m)), \
	$(if $(shell command -v mpicc),any))
MPI_PARTS := collectives $(patsubst tests/layer/%.c,%,$(filter-out \
	%_tcp.c,$(sort $(wildcard tests/layer/test_*.c))))
MPI_TESTS := $(foreach p,tests only,$(MPIS:%=build/mpi-%/$p)) $(if $(MPIS),build/gpt-mpi)
MPI_TEST   = @mkdir -p $(@D); echo "  CC $@"; mpicc$(patsubst .any,,.$*) $(STD) -O1 -g $(WALL) \
	-DTSHARD_IMPLEMENTED
vpath test_%.c tests/layer
vpath collectives.c tests/mpi

build-tests: $(if $(findstring test_mpi,$(call chosen,$(SCRIPTS))),$(MPI_TESTS))

test-mpi: deps ## the layer and collective tests under mpirun, with Open MPI and MPICH
	@$(MAKE) --no-print-directory --keep-going -j$(jobs) $(MPI_TESTS) $(LAUNCHER); \
		$(PYTHON) tests/run.py tests/mpi/test_mpi.py

$(MPI_PARTS:%=build/mpi/%.o): build/mpi/%.o: %.c $(HEADERS)
	@mkdir -p $(@D); echo "  CC $@"
	@$(CC) $(STD) -O1 -g $(WALL) -DTESTS_MPI -Itests/support/plain -Dmain=$* -c -o $@ $< \
		$(if $(filter $<,$(filter-out $(LINKED),$(SOURCES))),-DTSHARD_STATIC)

build/mpi-%/tests: tests/mpi/main.c Makefile $(MPI_PARTS:%=build/mpi/%.o) $(OUT)/tests/library.o \
		$(HEADERS)
	$(MPI_TEST) -DTESTS_PARTS="$(foreach p,$(MPI_PARTS),X($p))" -o $@ $(filter %.c %.o,$^) $(LIBS)

build/mpi-%/only: tests/mpi/only.c $(OUT)/tests/library.o $(HEADERS)
	$(MPI_TEST) -o $@ $(filter %.c %.o,$^) $(LIBS)

# Kernels, products and ops on another processor, emulated: strict warnings, then the tests.
ARM       := aarch64-linux-gnu-gcc
ARM_TESTS := unit/test_kernel unit/test_gemm op/test_values op/test_golden op/test_gradcheck

test-arm: ## the kernels and ops compiled for aarch64 and run under qemu-user
	@command -v $(ARM) >/dev/null && command -v qemu-aarch64 >/dev/null || { \
		echo "test-arm: skipped: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross \
	qemu-user"; exit 0; }; mkdir -p build/arm; for t in $(ARM_TESTS); do p=build/arm/$${t#*/}; \
		case " $(LINKED) " in *" tests/$$t.c "*) l=tests/support/library.c;; *) l=;; esac; \
		$(ARM) $(filter-out -fopenmp,$(STD)) -O2 -fno-math-errno $(WALL) -Werror \
			-Itests/support/plain -static -o $$p tests/$$t.c $$l $(LIBS) && qemu-aarch64 $$p >$$p.log \
			|| { tail -n 5 $$p.log; exit 1; }; echo "ok    $$t  $$(tail -n 1 $$p.log)"; done

# Every tests/fault/fault_*.c prints a table; the soak also runs under two sanitizers.
FAULTS := $(patsubst %.c,build/%,$(sort $(wildcard tests/fault/fault_*.c)))

faults: deps ## break worlds of ranks in every way; writes build/faults.json
	@$(MAKE) --no-print-directory -j$(jobs) $(FAULTS)
	@for s in asan tsan; do \
		$(MAKE) --no-print-directory san=$$s build/$$s/tests/fault/fault_soak || exit 1; done
	@FULL=$(FULL) $(PYTHON) tests/fault/run.py $(call chosen,$(FAULTS) \
		build/asan/tests/fault/fault_soak build/tsan/tests/fault/fault_soak)

# ---- checks ------------------------------------------------------------------

check: deps ## the strict warning set in every standard, gcc and clang, and their analyzers
	@$(PYTHON) tests/compile/check.py --jobs $(jobs) --warn "$(WARN)" --warn-c "$(WARN_C)"

lint: deps ## the house rules: rooms, names, budgets, documentation, symbols, macros
	@$(PYTHON) tests/lint/lint.py

# The tests that tests/seeds/table.md names; make test runs them too, as one of its scripts.
SEEDS = $(shell $(PYTHON) tests/seeds/test_seeds.py --programs)

seeds: deps ## the table of features, each with the test that proves it
	@$(MAKE) --no-print-directory -j$(jobs) $(SEEDS:%=$(OUT)/tests/%)
	@$(PYTHON) tests/seeds/test_seeds.py --table

# Every tests/fuzz/fuzz_<name>.c is a libFuzzer target, its seeds lie in tests/fuzz/<name>.
# What it finds beside, and inputs that break something, are kept in build/fuzz.
seconds ?= 60
FUZZERS := $(patsubst tests/fuzz/fuzz_%.c,build/fuzz/%,$(wildcard tests/fuzz/fuzz_*.c))
$(foreach f,$(FUZZERS:build/fuzz/%=%),$(eval $(OUT)/tests/fuzz/test_$(f): tests/fuzz/fuzz_$(f).c))

fuzz: deps-fuzz $(FUZZERS) ## feed random bytes to what reads files and connections
	@for f in $(FUZZERS); do mkdir -p $$f.found; echo "fuzz: $${f##*/}"; \
		$$f -max_total_time=$(seconds) -max_len=4096 -artifact_prefix=$$f. $$f.found \
			tests/fuzz/$${f##*/} >$$f.log 2>&1 || { tail -n 40 $$f.log; exit 1; }; \
		tail -n 1 $$f.log; done

build/fuzz/wire: LIBS += -luv -lsodium

build/fuzz/%: tests/fuzz/fuzz_%.c $(HEADERS)
	@mkdir -p $(@D)
	clang -std=c99 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
		-o $@ $< $(LIBS)

# ---- benchmarks --------------------------------------------------------------

bench: build/gpt ## compare with BLIS, gloo, Open MPI and PyTorch; writes build/bench.json
	@FULL=$(FULL) $(PYTHON) tests/bench/run.py $(ARGS)

bench-comm: ## of that, the collectives over TCP
	@$(PYTHON) tests/bench/run.py --only comm_tcp $(ARGS)

overhead: ## what checking layouts and recording the tape costs, of a step (needs valgrind)
	@$(PYTHON) tests/bench/overhead.py

# ---- packages ----------------------------------------------------------------
# What is missing is installed where apt-get and the right to use it are there; else
# it is named, and the work goes on without.

install = @missing=; for p in $(1); do \
	dpkg-query -W -f '$${db:Status-Status}' $$p 2>/dev/null | grep -qx installed \
		|| missing="$$missing $$p"; done; \
	if [ -z "$$missing" ] || ! command -v apt-get >/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ]; then sudo=; elif sudo -n true 2>/dev/null; then sudo="sudo -n"; \
	else echo "missing packages: apt-get install$$missing"; exit 0; fi; \
	echo "installing$$missing"; mkdir -p build; \
	{ $$sudo apt-get update && $$sudo env DEBIAN_FRONTEND=noninteractive \
		apt-get install -y --no-install-recommends $$missing; } >build/deps.log 2>&1 \
		|| { echo "not installed:$$missing; the end of build/deps.log:"; tail -n 5 build/deps.log; }

deps: ## install what the tests and checks need (Debian, Ubuntu)
	$(call install,build-essential clang libcmocka-dev libuv1-dev libsodium-dev libblis-pthread-dev \
		iproute2 python3 libopenmpi-dev openmpi-bin libmpich-dev mpich)
deps-fuzz: deps ## install what `make fuzz` needs beside
	$(call install,libclang-rt-dev)
deps-bench: ## install the peers that `make bench` compares with
	$(call install,libblis-pthread-dev libblis4-openmp libopenblas0-pthread libopenmpi-dev \
		openmpi-bin libgloo-dev libuv1-dev libsodium-dev python3-torch)

clean: ## remove build/
	rm -rf build
