#include <immintrin.h>
#include <stdatomic.h>
#include <sched.h>
#include <stddef.h>
void floor_barrier(_Atomic unsigned *arrived, unsigned phase) {
    atomic_fetch_add(arrived, 1);
    for (unsigned spins = 0; (int)(atomic_load(arrived) - phase) < 0;)
        if (++spins > 10000) sched_yield();
}
void floor_pass(float *restrict a, float *restrict b, size_t n) {
    for (size_t i = 0; i < n; i++) a[i] = b[i] = a[i] + b[i];
}
#define K(name, W, body) void name(float *a, float *b, size_t n) { __m512 q=_mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)); (void)q; for (size_t i = 0; i + 16*W <= n; i += 16*W) { __m512 x[W]; body } }
#define L for (int j = 0; j < W; j++)
#define ADD for(int j=0;j<4;j++) x[j]=_mm512_add_ps(_mm512_loadu_ps(a+i+16*j),_mm512_loadu_ps(b+i+16*j));
#define NAN4 for(int j=0;j<4;j++) x[j]=_mm512_mask_mov_ps(x[j],_mm512_cmp_ps_mask(x[j],x[j],3),q);
#define ST for(int j=0;j<4;j++) _mm512_storeu_ps(a+i+16*j,x[j]); for(int j=0;j<4;j++) _mm512_storeu_ps(b+i+16*j,x[j]);
#define ST1 for(int j=0;j<4;j++) {_mm512_storeu_ps(a+i+16*j,x[j]); _mm512_storeu_ps(b+i+16*j,x[j]);}
#define PF for(int j=0;j<4;j++){_mm_prefetch((char*)(a+i+16*j)+1024,_MM_HINT_T0);_mm_prefetch((char*)(b+i+16*j)+1024,_MM_HINT_T0);}
#define PFW for(int j=0;j<4;j++){__builtin_prefetch((char*)(a+i+16*j)+1024,1);__builtin_prefetch((char*)(b+i+16*j)+1024,1);}
K(k_plain, 4, ADD ST)
K(k_plain1, 4, ADD ST1)
K(k_nan, 4, ADD NAN4 ST)
K(k_nan1, 4, ADD NAN4 ST1)
K(k_pf, 4, PF ADD NAN4 ST)
K(k_pfw, 4, PFW ADD NAN4 ST)
K(k_pfp, 4, PF ADD ST)
K(k_pfwp, 4, PFW ADD ST)
K(k_or, 4, ADD __m512 s=_mm512_add_ps(_mm512_add_ps(x[0],x[1]),_mm512_add_ps(x[2],x[3])); if(__builtin_expect(_mm512_cmp_ps_mask(s,s,3),0)) {NAN4} ST)
/* 256 bit vectors, one at a time */
#define K2(name, body) void name(float *a, float *b, size_t n) { for (size_t i = 0; i + 8 <= n; i += 8) { __m256 x=_mm256_add_ps(_mm256_loadu_ps(a+i),_mm256_loadu_ps(b+i)); body _mm256_storeu_ps(b+i,x);_mm256_storeu_ps(a+i,x);} }
K2(k_256, )
K2(k_256n, x=_mm256_mask_mov_ps(x,_mm256_cmp_ps_mask(x,x,3),_mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)));)
#define K1(name, body) void name(float *a, float *b, size_t n) { for (size_t i = 0; i + 16 <= n; i += 16) { __m512 x=_mm512_add_ps(_mm512_loadu_ps(a+i),_mm512_loadu_ps(b+i)); body _mm512_storeu_ps(b+i,x);_mm512_storeu_ps(a+i,x);} }
K1(k_512, )
K1(k_512n, x=_mm512_mask_mov_ps(x,_mm512_cmp_ps_mask(x,x,3),_mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));)
