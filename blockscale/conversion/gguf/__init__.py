"""Any checkpoint as one GGUF file that llama.cpp loads. Facts about its graphs: llama.cpp of ggml 0.25.3."""
