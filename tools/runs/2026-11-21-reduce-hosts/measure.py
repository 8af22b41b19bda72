#!/usr/bin/env python3
"""Our plans of reduce and reduce-scatter between shaped hosts, one run each; see README.md."""
import sys,json,tempfile,time
sys.path.insert(0,'benches')
from shaped import Wire, run, until_interrupted, sh, environment
PX='target/release/phalanx'
def main():
    t0=time.time()
    with tempfile.TemporaryDirectory() as work:
        token=f'{work}/job.token'; sh(PX,'token','--out',token)
        for hosts,ranks in ((2,4),(3,2)):
            with Wire(hosts,1) as w:
                for op,rules in (('reduce-scatter',('direct','hosts','')),('reduce',('owners','root','hosts',''))):
                    for rule in rules:
                        if time.time()-t0>50: return
                        env={'PHALANX_TOKEN_FILE':token}
                        if rule: env['PHALANX_ALGORITHM']=f"{op.replace('-','_')}={rule}"
                        cmds=[(h,[PX,'bench',op,'--bytes','65536,8388608','--json'],{**e,**env}) for h,e in environment(w,ranks)]
                        out,failed=run(w,cmds,30)
                        if failed: print(op,rule,'FAILED',failed); continue
                        for o in out:
                            for l in o.splitlines():
                                if '{' in l:
                                    d=json.loads(l[l.index('{'):]); print(hosts,ranks,op,rule or 'auto',d['bytes'],round(d['median_us']/1e3,3),d.get('plan'),flush=True)
until_interrupted(main)
