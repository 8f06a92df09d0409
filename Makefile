# tshard: `make help` lists the targets; everything that is built goes under build/.
#
#   config=debug|release   how programs and tests are compiled          (release)
#   werror=1               warnings are errors
#   CC=gcc|clang           the compiler; `make check` runs both         (cc)
#   MPICC=mpicc.mpich      the one of build/gpt-mpi, which has --backend mpi (mpicc)
#   ARGS="..."             flags for examples/gpt.c (make run), build/llm (make chat) or
#                          tests/bench/run.py (make bench)
#   only=unit/test_base    the tests whose name holds this string       (all)
#   PREFIX=/usr/local      where make install puts things, below DESTDIR if that is given
#   seconds=60             how long make fuzz feeds each target         (60)
#   FULL=1                 tests and checks with all counts and combinations; make bench with three
#                          times the rounds

config ?= release
MPICC  ?= mpicc
jobs   ?= $(shell nproc 2>/dev/null || echo 1)
PYTHON ?= python3

# san is set by the sanitizer targets below, which call make again.
OUT := build$(if $(san),/$(san),$(if $(filter debug,$(config)),/debug))

# ---- flags -------------------------------------------------------------------
# The strict set. WARN is for C and C++, WARN_C for C alone; check.py adds what only clang knows.

WARN   := -Wall -Wextra -pedantic -Wconversion -Wsign-conversion -Wshadow -Wundef -Wcast-qual \
          -Wcast-align -Wdouble-promotion -Wformat=2 -Wvla -Wwrite-strings
WARN_C := -Wstrict-prototypes -Wmissing-prototypes -Wc++-compat

OPT_release := -O2 -g1 -fno-math-errno
OPT_debug   := -O0 -g
OPT_ubsan   := -O1 -g1 -fsanitize=undefined -fno-sanitize-recover=all
OPT_asan    := $(OPT_ubsan) -fsanitize=address -fno-omit-frame-pointer
OPT_tsan    := -O1 -g1 -fsanitize=thread

OPT   = $(OPT_$(or $(san),$(config)))
WALL := $(WARN) $(WARN_C) $(if $(filter 1,$(werror)),-Werror)
LIBS := -lm -pthread

# ---- what this machine has ---------------------------------------------------
# With libuv and libsodium, gpt and the tests have the TCP backend; with BLIS, its matrix product;
# with cJSON and PCRE2, there is build/llm. OpenMP gives a rank more threads (the thread sanitizer
# does not know its barriers). Without cmocka, the tests use the plain substitute of
# tests/support/plain.

has     = $(shell printf '\043include <%s.h>\n' stdarg stddef setjmp stdint $(1) \
	| $(CC) -E - >/dev/null 2>&1 && echo yes)
UV     := $(call has,uv sodium)
LLM    := $(if $(call has,cjson/cJSON),$(shell printf '\043include <pcre2.h>\n' \
	| $(CC) -DPCRE2_CODE_UNIT_WIDTH=8 -E - >/dev/null 2>&1 && echo yes))
CMOCKA := $(call has,cmocka)
HAS_CXX := $(shell command -v $(CXX))
BLIS   := $(patsubst %/libblis.so,%,$(firstword $(wildcard /usr/lib/*/blis-pthread/libblis.so)))
OPENMP := $(if $(filter tsan,$(san)),,$(shell echo 'int main(void) { return 0; }' | \
	$(CC) -fopenmp -x c -o /dev/null - 2>/dev/null && echo -fopenmp))
MPIS   := $(or $(foreach m,openmpi mpich,$(if $(shell command -v mpicc.$m),$m)), \
	$(if $(shell command -v mpicc),any))

# Backends need POSIX beside strict C99.
STD       := -std=c99 -D_POSIX_C_SOURCE=200809L $(OPENMP)
LINK_BLIS := $(if $(BLIS),-L$(BLIS) -Xlinker -rpath -Xlinker $(BLIS) -lblis)

# All of that is part of what a program depends on: this file changes when something is installed,
# or the flags are others.
FOUND := $(OUT)/found
$(FOUND): FORCE
	@mkdir -p $(@D); echo '$(CC) $(shell $(CC) -dumpversion); $(STD) $(OPT) $(WALL); uv: $(UV);' \
		'llm: $(LLM); cmocka: $(CMOCKA); c++: $(HAS_CXX); blis: $(BLIS); mpi: $(MPIS)' >$@.new; \
	if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi
FORCE:

# ---- what there is to build --------------------------------------------------
# Every tests/<kind>/test_*.c is one cmocka program. Those of PRIVATE look inside the library and
# are one program, which has a name for each; the others are linked with the library, which is
# compiled once for all. A line "/* build: double */" adds a program with TSHARD_REAL=double,
# "/* build: nosimd */" one with the portable kernels alone; under a sanitizer with FULL=1 only.
# Every example with a number is a test, too: it runs and prints something. Every
# tests/<kind>/test_*.py reports in cmocka's words.

HEADERS  := $(wildcard tshard.h backends/*.h examples/*.h examples/llm/*.h examples/llm/*/*.h \
            tests/*.h tests/*/*.h)
SOURCES  := $(wildcard $(patsubst %,tests/%/test_*.c,unit op layer models comm fault oom fuzz llm))
PRIVATE  := $(patsubst "../%",tests/%,$(shell grep -oh '"\.\./.*/test_.*"' tests/support/private.c))
marked    = $(if $(SOURCES),$(shell grep -lx '/\* build:.* $(1)\b.*\*/' $(SOURCES)))
DOUBLES  := $(call marked,double)
NOSIMDS  := $(call marked,nosimd)
VARIANTS := $(if $(and $(san),$(if $(FULL),,1)),, \
	$(DOUBLES:%.c=$(OUT)/%_double) $(NOSIMDS:%.c=$(OUT)/%_nosimd))
TESTS    := $(sort $(SOURCES:%.c=$(OUT)/%) $(VARIANTS))
RULES    := src/rules.mk examples/llm/rules.mk $(patsubst %,tests/%/rules.mk,fuzz mpi bench)
EXAMPLES := $(addprefix $(OUT)/,$(basename $(sort $(wildcard examples/[0-9]*.c examples/0*.cpp))))
SCRIPTS  := $(if $(san),tests/fault/test_run.py,$(wildcard tests/*/test_*.py))
LAUNCHER := $(OUT)/tshard-run
UV_USERS := $(patsubst %.c,$(OUT)/%,$(shell grep -ls 'tshard_uv.h\|fuzz_wire' tests/*/*.c))
UV_TESTS := $(filter $(TESTS),$(UV_USERS))
LLM_USERS := $(patsubst %.c,$(OUT)/%,\
	$(shell grep -ls 'llm/[a-z]*.h"\|fuzz_\(config\|data\|tokenizer\|text\|gguf\)' \
	examples/*.c tests/*/*.c))
LLM_TESTS := $(filter $(TESTS) $(EXAMPLES),$(LLM_USERS))
named     = $(strip $(foreach o,$(only),$(findstring $o,$(1))))
chosen    = $(if $(only),$(foreach t,$(1),$(if $(call named,$t),$t)),$(1))
PROGRAMS := $(call chosen,$(TESTS) $(EXAMPLES))

.SECONDARY:
# Every target with a line of help is a command, not a file.
.PHONY: $(shell sed -n 's/^\([a-z][a-z -]*\):.*## .*/\1/p' Makefile $(RULES)) \
	build-tests test-run FORCE
.DEFAULT_GOAL := help

help: build/compile_commands.json ## list the targets; clangd then opens each file of src/
	@sed -n 's/^#   //p' Makefile
	@sed -n 's/^\([a-z][a-z -]*\):.*## /make \1\n/p' Makefile $(RULES) | paste - - | expand -t 24

# ---- run ---------------------------------------------------------------------

run: ## train a GPT on all cores; ARGS="--text FILE ..." for your own text
	@$(MAKE) --no-print-directory -j$(jobs) $(OUT)/gpt
	@$(OUT)/gpt --out build/run $(ARGS)

# The library of the programs gpt, gpt-mpi and llm: most of the time that they take to compile.
FAST := -O3 -fno-math-errno
$(OUT)/tshard.o: private OPT_release := $(FAST)
$(OUT)/tshard.o: backends/tshard_backend.h tshard.h $(FOUND)
	@mkdir -p $(@D)
	$(CC) $(STD) $(OPT) -DTSHARD_IMPLEMENTATION -x c -c -o $@ $< && times >$(@:.o=.times)

$(OUT)/gpt $(OUT)/gpt.o build/gpt-mpi build/gpt-mpi.o: private OPT_release := $(FAST)
build/gpt-mpi build/gpt-mpi.o: private CC := $(MPICC)
build/gpt-mpi.o: private DEFINES := -DGPT_MPI
$(OUT)/gpt.o build/gpt-mpi.o: examples/gpt.c $(HEADERS) $(FOUND)
	@mkdir -p $(@D)
	$(CC) $(STD) $(OPT) $(DEFINES) -DTSHARD_IMPLEMENTED $(if $(UV),-DGPT_TCP) \
		$(if $(BLIS),-DGPT_BLIS) -c -o $@ $<
$(OUT)/gpt build/gpt-mpi: %: %.o $(OUT)/tshard.o
	$(CC) $(OPENMP) $(OPT) -o $@ $^ $(LIBS) $(if $(UV),-luv -lsodium) $(LINK_BLIS)

tshard-run: $(LAUNCHER) ## the launcher of jobs over TCP, on one host or several
$(LAUNCHER): backends/tshard-run.c $(FOUND)
	@mkdir -p $(@D)
	$(CC) $(filter-out $(OPENMP),$(STD)) $(OPT) $(WALL) -o $@ $< -luv -lsodium

# ---- tests -------------------------------------------------------------------

test: deps ## build and run all tests
	@$(MAKE) --no-print-directory test-run

asan ubsan tsan: deps ## the tests under a sanitizer
	@$(MAKE) --no-print-directory san=$@ test-run

# A program that does not build is a failed test, not the end of the run; one whose libraries are
# missing is a skipped test.
test-run:
	@$(if $(CMOCKA),,echo "libcmocka-dev is not here: the tests use a plain substitute";) \
	$(if $(UV),,echo "libuv1-dev or libsodium-dev is not here: no test of the TCP backend";) \
	$(MAKE) --no-print-directory --keep-going -j$(jobs) build-tests; \
	TSHARD_RUN=$(abspath $(LAUNCHER)) PYTHON=$(PYTHON) tests/run.sh \
		--jobs $(jobs) $(if $(san),--slow 5) $(call chosen,$(SCRIPTS)) $(PROGRAMS)

# The longest compilations first.
build-tests: $(if $(filter %_hosts.py %_gpt.py %_resume.py,$(call chosen,$(SCRIPTS))),$(OUT)/gpt) \
	$(if $(LLM),$(if $(filter %_llm.py %_memory.py %_finetune.py,$(call chosen,$(SCRIPTS))), \
	$(OUT)/llm)) \
	$(PROGRAMS) $(if $(UV),$(LAUNCHER))

COMPILE_TEST  = @mkdir -p $(@D); echo "  CC $@"; $(CC) $(STD) $(OPT) $(WALL) \
	$(if $(CMOCKA),,-Itests/support/plain)
LINK_TEST     = $(if $(CMOCKA),-lcmocka) $(LIBS)
CONFIG_double := -DTSHARD_REAL=double -DTESTS_DOUBLE
CONFIG_nosimd := -DTSHARD_NO_SIMD -Og
# For what includes the implementation, but is linked with the library.
LINKED       := -DTSHARD_IMPLEMENTED -DTSHARD_THREADS_IMPLEMENTED

# The library with the tests that look inside it: see tests/support/private.c.
PRIVATE_PARTS = $(PRIVATE) $(wildcard tests/fuzz/fuzz_*.c) $(HEADERS) $(FOUND)
$(OUT)/tests/library.o: tests/support/private.c tests/support/library.c $(PRIVATE_PARTS)
	$(COMPILE_TEST) -Wno-shadow -c -o $@ $<
$(OUT)/tests/library_%.o: tests/support/private.c tests/support/library.c $(PRIVATE_PARTS)
	$(COMPILE_TEST) -Wno-shadow $(CONFIG_$*) -c -o $@ $<
$(OUT)/tests/library_uv.o: tests/support/library_uv.c $(HEADERS) $(FOUND)
	$(COMPILE_TEST) -c -o $@ $<
$(OUT)/tests/private: tests/support/private_main.c $(OUT)/tests/library.o
	$(COMPILE_TEST) -o $@ $^ $(LINK_TEST)
$(OUT)/tests/private_%: tests/support/private_main.c $(OUT)/tests/library_%.o
	$(COMPILE_TEST) -o $@ $^ $(LINK_TEST)

private = $(filter $(TESTS),$(PRIVATE:%.c=$(OUT)/%$(1)))
$(call private): $(OUT)/tests/private
$(call private,_double): $(OUT)/tests/private_double
$(call private,_nosimd): $(OUT)/tests/private_nosimd
$(call private) $(call private,_double) $(call private,_nosimd):
	@mkdir -p $(@D); ln -f $< $@

# In place of a program whose library or compiler is missing: a test that is skipped.
skipped = @mkdir -p $(@D); printf '%s\n' '\#!/bin/sh' 'echo "skip: needs $(1)"' \
	'echo "[  SKIPPED ] tests: 1 test(s), listed below:"' >$@; chmod +x $@

ifneq ($(UV),)
$(UV_USERS): LIBS += -luv -lsodium
$(OUT)/tests/fault/test_uv $(OUT)/tests/layer/test_replicas_tcp: $(OUT)/tests/library_uv.o
else
$(UV_TESTS): $(FOUND)
	$(call skipped,libuv1-dev libsodium-dev)
endif
ifneq ($(LLM),)
$(LLM_USERS): LIBS += -lcjson -lpcre2-8
else
$(LLM_TESTS): $(FOUND)
	$(call skipped,libcjson-dev libpcre2-dev)
endif
$(OUT)/tests/op/test_gemm_%: LIBS += $(if $(BLIS),-DTESTS_BLIS) $(LINK_BLIS)

# With the implementation, which computes with a model of AMX's instructions.
$(OUT)/tests/unit/test_amx: tests/unit/test_amx.c tests/unit/test_gemm.c $(HEADERS) $(FOUND)
	$(COMPILE_TEST) -Og -Wno-shadow -o $@ $< $(LINK_TEST)
$(OUT)/tests/%: tests/%.c $(OUT)/tests/library.o $(HEADERS) $(FOUND)
	$(COMPILE_TEST) $(LINKED) -o $@ $< $(filter %.o,$^) $(LINK_TEST)
$(OUT)/tests/%_double: tests/%.c $(OUT)/tests/library_double.o $(HEADERS) $(FOUND)
	$(COMPILE_TEST) $(LINKED) $(CONFIG_double) -o $@ $< $(filter %.o,$^) $(LINK_TEST)
$(OUT)/tests/%_nosimd: tests/%.c $(OUT)/tests/library_nosimd.o $(HEADERS) $(FOUND)
	$(COMPILE_TEST) $(LINKED) $(CONFIG_nosimd) -o $@ $< $(filter %.o,$^) $(LINK_TEST)
$(OUT)/examples/%: examples/%.c $(OUT)/tests/library.o $(HEADERS) $(FOUND)
	$(COMPILE_TEST) $(LINKED) -o $@ $< $(OUT)/tests/library.o $(LINK_TEST)

$(OUT)/examples/%: examples/%.cpp $(OUT)/tests/library.o $(HEADERS) $(FOUND)
	$(if $(HAS_CXX),@echo "  CXX $@"; $(CXX) -std=c++17 $(OPENMP) $(OPT) $(WARN) $(LINKED) -o $@ $< \
		$(OUT)/tests/library.o $(LINK_TEST),$(call skipped,g++))

test-bare: ## the README's two commands on a bare Debian 12 in build/bare; rev=COMMIT (HEAD)
	@only="$(only)" tests/bare.sh $(rev)

test-mpi: deps ## the layer and collective tests under mpirun, with Open MPI and MPICH
	@$(MAKE) --no-print-directory --keep-going -j$(jobs) $(MPI_TESTS) $(if $(UV),$(LAUNCHER)); \
		PYTHON=$(PYTHON) tests/run.sh tests/mpi/test_mpi.py

# Other processors, emulated, and another libc. only=armhf: that platform alone.
test-cross: deps-cross ## the unit, op, layer and threads tests on seven other platforms
	@$(PYTHON) tests/compile/cross.py --jobs $(jobs) --warn "$(WARN)" --warn-c "$(WARN_C)" \
		$(if $(only),--platform $(only))

test-windows: ## units, ops, layers and threads for Windows, with mingw-w64 under wine
	@$(PYTHON) tests/compile/windows.py --warn "$(WARN)" --warn-c "$(WARN_C)" --only "$(only)"

# Every tests/fault/fault_*.c prints a table; the soak also runs under two sanitizers.
FAULTS := $(patsubst %.c,build/%,$(sort $(wildcard tests/fault/fault_*.c)))

faults: deps ## kill, stop, cut off and confuse ranks; writes build/faults.json
	@$(MAKE) --no-print-directory -j$(jobs) $(FAULTS)
	@for s in asan tsan; do \
		$(MAKE) --no-print-directory san=$$s build/$$s/tests/fault/fault_soak || exit 1; done
	@FULL=$(FULL) $(PYTHON) tests/fault/run.py $(call chosen,$(FAULTS) \
		build/asan/tests/fault/fault_soak build/tsan/tests/fault/fault_soak)

# ---- checks ------------------------------------------------------------------

check: deps ## strict warnings in every standard, analyzers; other compilers and processors
	@$(PYTHON) tests/compile/check.py --jobs $(jobs) --warn "$(WARN)" --warn-c "$(WARN_C)"

lint: deps ## the rules of the source: sections, names, lengths, documentation, symbols
	@$(PYTHON) tests/lint/lint.py

# The tests that tests/seeds/table.md names; make test runs them too, as one of its scripts.
SEEDS = $(shell $(PYTHON) tests/seeds/test_seeds.py --programs)

seeds: deps ## the feature parity table with five libraries, each row with its test
	@$(MAKE) --no-print-directory -j$(jobs) $(SEEDS:%=$(OUT)/tests/%)
	@$(PYTHON) tests/seeds/test_seeds.py --table

# ---- installing --------------------------------------------------------------
# backends/package/ holds what an installed tshard has beside the headers.

PREFIX ?= /usr/local
# MAJOR.MINOR until 1.0: a program of another minor version does not load the library.
SONAME := libtshard.so.$(shell sed -n 's/^.define TSHARD_VERSION_M.*OR //p' tshard.h | paste -sd .)

shared: $(OUT)/$(SONAME) ## build/libtshard.so: the library for other languages
$(OUT)/shared.o: private OPT_release := -O3 -fno-math-errno
$(OUT)/shared.o: backends/package/library.c $(HEADERS) $(FOUND)
	@mkdir -p $(@D)
	$(CC) $(STD) $(OPT) $(WALL) -DTSHARD_SHARED -fPIC -fvisibility=hidden -c -o $@ $<
$(OUT)/$(SONAME): $(OUT)/shared.o backends/package/library.map
	@ln -sf $(@F) $(OUT)/libtshard.so
	$(CC) $(OPENMP) $(OPT) -shared -o $@ $< $(LIBS) \
		-Wl,-soname,$(@F),--version-script,backends/package/library.map

install: $(if $(UV),$(LAUNCHER)) $(if $(filter shared,$(MAKECMDGOALS)),$(OUT)/$(SONAME))
install uninstall: ## headers and launcher, below PREFIX; `make shared install`: the library too
	@PREFIX='$(PREFIX)' DESTDIR='$(DESTDIR)' backends/package/install.sh $@ $^

release-check: ## is this tree ready to be tagged as a version, and by which command
	@backends/package/release.sh

# ---- packages ----------------------------------------------------------------
# Lists and installs Debian's and Ubuntu's; without the right to, prints the command that does.

deps: ## install what the tests and checks need
deps-fuzz: deps ## install what `make fuzz` needs beside
deps-cross: ## install the compilers and emulators of `make test-cross`
deps-windows: ## install what `make test-windows` needs (900 MB)
deps-bench: ## install the peers that `make bench` compares with
deps deps-fuzz deps-cross deps-windows deps-bench:
	@tests/packages.sh $@
	@$(if $(filter deps-bench,$@),$(PYTHON) tests/bench/run.py --install || true)

clean: ## remove build/
	rm -rf build

include $(RULES)
