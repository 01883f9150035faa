/* The parts of a report's page as bytes of the program (cmd/report_page.cc). CMakeLists.txt defines
   the paths; without D3 its part is empty, and the report command says so. */
.section .rodata

.macro asset name, path
  .global retrace_\name\()_begin
  .global retrace_\name\()_end
retrace_\name\()_begin:
  .incbin "\path"
retrace_\name\()_end:
  .byte 0
.endm

asset page_html, PAGE_HTML
asset page_css, PAGE_CSS
asset page_js, PAGE_JS
asset d3_js, D3_JS
asset d3_license, D3_LICENSE

.section .note.GNU-stack, "", %progbits
