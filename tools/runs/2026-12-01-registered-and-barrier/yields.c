#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <time.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <stdatomic.h>
static double now(){struct timespec t;clock_gettime(CLOCK_MONOTONIC,&t);return t.tv_sec+t.tv_nsec*1e-9;}
struct s{_Alignas(128) _Atomic long ph;} *s;static int n,me;static long k;
static void barrier(){k++;atomic_store(&s[me].ph,k);for(;;){int ok=1;for(int r=0;r<n;r++)if(atomic_load(&s[r].ph)<k){ok=0;break;}if(ok)return;sched_yield();}}
static int cmp(const void*a,const void*b){double x=*(double*)a,y=*(double*)b;return (x>y)-(x<y);}
int main(int c,char**v){n=atoi(v[1]);s=mmap(0,1<<20,3,MAP_SHARED|MAP_ANONYMOUS,-1,0);double*t=mmap(0,8<<20,3,MAP_SHARED|MAP_ANONYMOUS,-1,0);
for(me=0;me<n-1;me++)if(!fork())break;
cpu_set_t q;CPU_ZERO(&q);CPU_SET(me%2,&q);sched_setaffinity(0,sizeof q,&q);
for(int i=0;i<5000;i++)barrier();
for(int i=0;i<20000;i++){barrier();double b=now();barrier();t[i*8+me]=now()-b;}
barrier();double b=now();for(int i=0;i<50000;i++)barrier();double e=(now()-b)/50000;
if(me!=n-1)_exit(0);while(wait(0)>0);
for(int i=0;i<20000;i++){double m=0;for(int r=0;r<n;r++)if(t[i*8+r]>m)m=t[i*8+r];t[i]=m;}
qsort(t,20000,8,cmp);printf("bare yield barrier %d: median %.2f chain %.2f\n",n,t[10000]*1e6,e*1e6);}
