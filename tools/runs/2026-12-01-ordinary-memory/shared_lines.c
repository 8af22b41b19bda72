#define _GNU_SOURCE
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
static double now(){struct timespec t;clock_gettime(CLOCK_MONOTONIC,&t);return t.tv_sec+t.tv_nsec*1e-9;}
#define P 2
static struct{_Alignas(128) _Atomic long ph;} ph[P];
static char*stage[P][2],*result[P][2],*data[P]; static size_t n,seg; static int mode,pausing,iters;
static long phase[P];
static double waitt[P];static int pf,pf_d=1024;
static void step(int me){long k=++phase[me];if(pf&16)_mm_sfence();atomic_store(&ph[me].ph,k);double t=now();while(atomic_load(&ph[1-me].ph)<k){if(pausing)_mm_pause();}waitt[me]+=now()-t;}

static void copyv(char*d,const char*s,size_t m){for(size_t i=0;i<m;i+=256){if(pf&1)for(int j=0;j<256;j+=64){__asm__ volatile("prefetchw %0"::"m"(d[i+j+pf_d]));}if(pf&8)for(int j=0;j<256;j+=64)_mm_prefetch(d+i+j+pf_d,_MM_HINT_T0);if(pf&2)for(int j=0;j<256;j+=64)_mm_prefetch(s+i+j+1024,_MM_HINT_T0);for(int j=0;j<256;j+=64){__m512i x=_mm512_loadu_si512(s+i+j);if((pf&16)&&!((size_t)(d+i+j)&63))_mm512_stream_si512((void*)(d+i+j),x);else _mm512_storeu_si512(d+i+j,x);}}}
static void fold(float*a,const float*b,const float*c,float*r,size_t m){for(size_t i=0;i<m;i+=64){if(pf&1)for(int j=0;j<64;j+=16){__asm__ volatile("prefetchw %0"::"m"(*((char*)(r+i+j)+pf_d)));}if(pf&8)for(int j=0;j<64;j+=16){_mm_prefetch((char*)(r+i+j)+pf_d,_MM_HINT_T0);}if(pf&2)for(int j=0;j<64;j+=16){_mm_prefetch((char*)(b+i+j)+1024,_MM_HINT_T0);_mm_prefetch((char*)(c+i+j)+1024,_MM_HINT_T0);}for(int j=0;j<64;j+=16){__m512 x=_mm512_add_ps(_mm512_loadu_ps(b+i+j),_mm512_loadu_ps(c+i+j));_mm512_storeu_ps(a+i+j,x);if((pf&16)&&!((size_t)(r+i+j)&63))_mm512_stream_ps(r+i+j,x);else _mm512_storeu_ps(r+i+j,x);}}}
static double tc[P],tf[P],tg[P];
static void allreduce(int me){size_t S=(n+seg-1)/seg;size_t h=seg/2;int o=1-me;double t;
 #define ST(i) {t=now();(pf&4?copyv:(void(*)(char*,const char*,size_t))memcpy)(stage[me][(i)%2]+o*h,data[me]+(i)*seg+o*h,h);tc[me]+=now()-t;}
 #define FO(i) {t=now();fold((float*)(data[me]+(i)*seg+me*h),(float*)(me?stage[o][(i)%2]+me*h:data[me]+(i)*seg+me*h),(float*)(me?data[me]+(i)*seg+me*h:stage[o][(i)%2]+me*h),(float*)(result[me][(i)%2]+me*h),h/4);tf[me]+=now()-t;}
 #define GE(i) {t=now();(pf&4?copyv:(void(*)(char*,const char*,size_t))memcpy)(data[me]+(i)*seg+o*h,result[o][(i)%2]+o*h,h);tg[me]+=now()-t;}
 ST(0);step(me);
 for(size_t i=1;i<=S;i++){if(i<S)ST(i);FO(i-1);if(i>=2)GE(i-2);step(me);}
 GE(S-1);
}
static void inplace(int me){size_t S=(n+seg-1)/seg;size_t h=seg/2;int o=1-me;double t;
 #define FI(i) {t=now();float*d=(float*)(data[me]+(i)*seg+me*h),*p=(float*)(stage[o][(i)%2]+me*h);if(me)fold(d,p,d,p,h/4);else fold(d,d,p,p,h/4);tf[me]+=now()-t;}
 #define GI(i) {t=now();memcpy(data[me]+(i)*seg+o*h,stage[me][(i)%2]+o*h,h);tg[me]+=now()-t;}
 ST(0);step(me);
 for(size_t i=1;i<=S;i++){if(i>=2)GI(i-2);if(i<S)ST(i);FI(i-1);step(me);}
 GI(S-1);
}
static void registered(int me){size_t h=n/2;step(me);double t=now();float*x=(float*)(data[0]+me*h),*y=(float*)(data[1]+me*h);fold(x,x,y,y,h/4);tf[me]+=now()-t;step(me);}
static void*w(void*a){int me=(long)a;cpu_set_t s;CPU_ZERO(&s);CPU_SET(mode==1?0:me,&s);if(mode!=2)pthread_setaffinity_np(pthread_self(),sizeof s,&s);for(int i=0;i<iters;i++){if(mode==6)inplace(me);else if(mode==5)registered(me);else allreduce(me);}return 0;}
int main(int c,char**v){n=atol(v[1]);seg=atol(v[2]);pausing=atoi(v[3]);mode=atoi(v[4]);iters=(256<<20)/n;if(iters>400)iters=400;size_t skew=c>5?atol(v[5]):0;pf=c>6?atoi(v[6]):0;if(c>7)pf_d=atoi(v[7]);
char*all=mmap(0,64<<20,3,MAP_SHARED|MAP_ANONYMOUS,-1,0);
for(int r=0;r<P;r++){for(int k=0;k<2;k++){stage[r][k]=all;all+=seg+skew;result[r][k]=all;all+=seg+skew;}data[r]=mmap(0,n+8192,3,MAP_PRIVATE|MAP_ANONYMOUS,-1,0);data[r]+=16;memset(data[r],0,n);}
pthread_t t[P];double b=now();for(long r=0;r<P;r++)pthread_create(&t[r],0,w,(void*)r);for(int r=0;r<P;r++)pthread_join(t[r],0);double e=(now()-b)/iters*1e6;
printf("pf %d d %d n %zu seg %zu pause %d mode %d skew %zu: %.1f us  (stage %.1f fold %.1f fetch %.1f wait %.1f)\n",pf,pf_d,n,seg,pausing,mode,skew,e,tc[0]/iters*1e6,tf[0]/iters*1e6,tg[0]/iters*1e6,waitt[0]/iters*1e6);}
