# reg.sh OLD NEW
f() { python3 -c "
import json,sys
for l in sys.stdin:
    if l.startswith('{'):
        d=json.loads(l);print(sys.argv[1],{k:round(d[k],3) for k in('step_ms_median','peak_rss_mib','first_step_s')})" "$1"; }
for i in 1 2; do for B in $1 $2; do
 $B bench train mnist --world 1 --threads 2 --batch 64 --steps 60 --json | f "mnist $B"
 $B bench train mobilenetv2 --world 1 --threads 2 --batch 64 --steps 20 --json | f "mobile $B"
 $B bench train resnet18 --world 1 --threads 2 --batch 32 --steps 8 --json | f "r32 $B"
 $B bench train resnet18 --world 1 --threads 2 --batch 32 --steps 8 --precision bf16 --json | f "r32bf16 $B"
done; done
