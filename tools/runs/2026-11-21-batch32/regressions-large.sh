f() { python3 -c "
import json,sys
for l in sys.stdin:
    if l.startswith('{'):
        d=json.loads(l);print(sys.argv[1],{k:round(d[k],3) for k in('step_ms_median','peak_rss_mib','first_step_s')})" "$1"; }
for i in 1 2; do for B in $1 $2; do
 $B bench train resnet18 --world 1 --threads 2 --batch 128 --steps 4 --warmup 4 --json | f "r128 $B"
 $B bench train resnet18 --world 2 --threads 1 --batch 64 --steps 4 --warmup 4 --json | f "2x1 r64 $B"
done; done
