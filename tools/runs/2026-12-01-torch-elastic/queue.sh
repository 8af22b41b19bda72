#!/bin/bash
# Runs the lines of queue.txt one after the other; lines may be added meanwhile.
cd /tmp/t/goodput/prog
n=0
while [ ! -e stop ]; do
  n=$((n+1)); line=$(sed -n ${n}p queue.txt)
  if [ -z "$line" ]; then n=$((n-1)); sleep 2; continue; fi
  set -- $line
  echo "$(date +%T) begin $line" >> queue.log
  python3 drive.py $1 $2 $3 $4 ../runs/$5 >> queue.log 2>&1
done
