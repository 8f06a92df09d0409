# Every tests/fuzz/fuzz_<name>.c is a libFuzzer target, its seeds lie in tests/fuzz/<name>.
# What it finds beside, and inputs that break something, are kept in build/fuzz.
seconds ?= 60
FUZZERS := $(patsubst tests/fuzz/fuzz_%.c,build/fuzz/%,$(wildcard tests/fuzz/fuzz_*.c))
$(foreach f,$(FUZZERS:build/fuzz/%=%),$(eval $(OUT)/tests/fuzz/test_$(f): tests/fuzz/fuzz_$(f).c))

# The longest input. Nearly all seeds are shorter, and more short ones run in a second.
longest = $(or $(longest_$(notdir $(1))),4096)
longest_text      := 256
longest_tokenizer := 2700

# Freed memory is kept for a while, so that its use is seen: 8 MB of it, as fresh pages are slow.
fuzz: export ASAN_OPTIONS := quarantine_size_mb=8:malloc_context_size=4
fuzz: deps-fuzz ## feed random bytes to what reads files and connections
	@$(MAKE) --no-print-directory --keep-going -j$(jobs) $(FUZZERS:%=%.run)

$(FUZZERS:%=%.run): %.run: % FORCE
	@mkdir -p $*.found
	@$* -max_total_time=$(seconds) -max_len=$(call longest,$*) -artifact_prefix=$*. \
		$*.found tests/fuzz/$(notdir $*) >$*.log 2>&1 || { tail -n 40 $*.log; exit 1; }
	@echo "fuzz: $(notdir $*): $$(tail -n 1 $*.log)"

build/fuzz/wire: LIBS += -luv -lsodium
$(filter-out build/fuzz/index build/fuzz/safetensors build/fuzz/wire,$(FUZZERS)): \
	LIBS += -lcjson -lpcre2-8

# The sanitizer's own comparisons count as the program's, so comparisons are not traced (those of
# strings are). Nor do its checks let clang vectorise the loops that ask for it: no warning of that.
build/fuzz/%: tests/fuzz/fuzz_%.c $(HEADERS)
	@mkdir -p $(@D)
	clang -std=c99 -O1 -g1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
		-fno-sanitize-coverage=trace-cmp -Wno-pass-failed $(CONFIG_nosimd) -o $@ $< $(LIBS)
