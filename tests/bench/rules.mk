# Speed, and the manual as a page.
bench: build/gpt ## compare with BLIS, gloo, Open MPI and PyTorch; writes build/bench.json
	@FULL=$(FULL) $(PYTHON) tests/bench/run.py $(ARGS)

bench-comm: ## only the part of make bench that measures collectives over TCP
	@$(PYTHON) tests/bench/run.py --only comm_tcp $(ARGS)

overhead: ## share of a step that goes into checks and the tape (needs valgrind)
	@$(PYTHON) tests/bench/overhead.py

docs: ## the manual and every public function as one page with a search: build/docs/index.html
	@$(PYTHON) tests/lint/docs.py build/docs/index.html
